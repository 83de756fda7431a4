"""`python -m hlat_jax.eval ...`: the harness's command `lm_eval ...` where it was not told of us, as in a checkout."""

from __future__ import annotations

import sys

from hlat_jax.evaluate import plugin
from hlat_jax.evaluate.tasks import require_harness


def main() -> None:
    """Runs the harness's own command line, which then knows our model type."""
    try:
        require_harness()
        plugin.register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
