#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a long real text: the language reference behind Python's `help()`, up to some length.

    python examples/demo_prompt.py --bytes 6000 > prompt.txt

It ends in the middle of a paragraph, after a whole word, so that there is something to go on with.
"""

import argparse
import pydoc_data.topics
import sys


def prompt(num_bytes: int) -> str:
    """About `num_bytes` bytes, never more; the longest chapters come first."""
    chapters = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    text = "\n".join(chapters).encode()[:num_bytes]
    return text[: text.rfind(b" ")].decode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=6000, help="length, at least 100")
    arguments = parser.parse_args()
    if arguments.bytes < 100:
        parser.error(f"--bytes must be at least 100, got {arguments.bytes}")
    sys.stdout.write(prompt(arguments.bytes))


if __name__ == "__main__":
    main()
