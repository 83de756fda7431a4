"""`python -m hlat_jax.eval ...`: the LM Evaluation Harness's own command `lm_eval ...`, with our model type registered.

The harness (0.4.13) reads model types from a table of its own and loads none by entry points, so `lm_eval` alone does
not know `--model hlat_jax`.
"""

from __future__ import annotations

import sys

from hlat_jax.evaluate.tasks import require_harness


def main() -> None:
    """Runs the harness's command line on `sys.argv`."""
    try:
        require_harness()
        from hlat_jax.evaluate import lm_eval_compat

        lm_eval_compat.register_model_type()
        lm_eval_compat.cli_evaluate()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
