"""`python parse_only.py SCRIPT WORDS ...` runs a script until it has read its command line, and no further."""

import argparse
import pathlib
import runpy
import sys

parse_args = argparse.ArgumentParser.parse_args


def parse_only(parser, *args, **kwargs):
    parse_args(parser, *args, **kwargs)
    sys.exit(0)


argparse.ArgumentParser.parse_args = parse_only
del sys.argv[0]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))  # as Python does for a script
runpy.run_path(sys.argv[0], run_name="__main__")
sys.exit(f"{sys.argv[0]} read no command line")
