"""`python -m autoround_fp8`: the same as `auto-round`."""

from autoround_fp8.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
