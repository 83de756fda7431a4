"""Text and tokenizer that ship with the package, named `package:FILE` in a config. See NOTICE for their origin."""
