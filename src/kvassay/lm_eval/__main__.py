"""`python -m kvassay.lm_eval`: the harness's own command line, with the model `kvassay` registered."""

from __future__ import annotations

import importlib.util
import sys

from kvassay.errors import KvassayError


def main() -> None:
    """Run it; 2 for wrong input, told on one line."""
    if importlib.util.find_spec("lm_eval") is None:
        sys.exit("error: lm-evaluation-harness is not installed; run: pip install 'kvassay[lm-eval]'")
    from lm_eval.__main__ import cli_evaluate

    from kvassay.lm_eval import model

    sys.argv[0] = f"python -m {model.__package__}"
    try:
        cli_evaluate()
    except KvassayError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
