# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a command that takes long: how far it is, and its text as it is written."""

from __future__ import annotations

import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence

from torch import nn

_SECONDS_OF_A_LOG = 10.0  # between two lines where stderr is no terminal
_SECONDS_OF_A_TERMINAL = 0.2


class Progress:
    """How far one part of a command is, on stderr.

    On a terminal it is one line, replaced in place and erased at the end. Elsewhere it is a line
    every 10 s without control characters; a part that ends sooner prints none. A thread of its own
    prints, so that seconds go on where a part gives no news.

    Args:
        label: what is being done.
        quiet: print nothing: on ranks other than the first.
    """

    def __init__(self, label: str, *, quiet: bool = False) -> None:
        self._label, self._news, self._shown = label, "", ""
        self._begun = time.monotonic()
        self._in_place = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if not quiet:
            self._thread = threading.Thread(target=self._print_until_the_end, daemon=True)
            self._thread.start()

    def at(self, news: str) -> None:
        """What there is to say from now on, such as "3 of 5 layers"."""
        self._news = news

    def close(self) -> None:
        """Ends it; once or several times."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        if self._in_place:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _print_until_the_end(self) -> None:
        seconds = _SECONDS_OF_A_TERMINAL if self._in_place else _SECONDS_OF_A_LOG
        if self._in_place:
            self._print()
        while not self._ended.wait(seconds):
            self._print()

    def _print(self) -> None:
        seconds = f"{time.monotonic() - self._begun:.0f} s"
        line = ", ".join(filter(None, (self._label, self._news, seconds)))
        if line == self._shown:
            return
        self._shown = line
        if self._in_place:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """``text`` with its control characters as their codes, but for the ends of lines and tabs: a
    terminal would obey them."""
    return "".join(
        f"\\x{ord(char):02x}" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char
        for char in text
    )


class TextStream:
    """Prints the text of tokens on stdout as they come, control characters as in :func:`visible`. A
    character of several tokens appears with its last one.

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        # Tokens before _read are printed. Those from _before on are decoded with the new ones:
        # the text of a token may depend on the one in front of it.
        self._before = self._read = 0

    def add(self, token: int) -> None:
        """Prints what ``token`` completes."""
        self._ids.append(token)
        self._print(rest=False)

    def close(self) -> None:
        """Prints what is no whole character, and ends the line."""
        self._print(rest=True)
        print(flush=True)

    def _print(self, *, rest: bool) -> None:
        printed = self._decode(self._ids[self._before : self._read])
        text = self._decode(self._ids[self._before :])
        if len(text) > len(printed) and (rest or not text.endswith("\N{REPLACEMENT CHARACTER}")):
            print(visible(text[len(printed) :]), end="", flush=True)
            self._before, self._read = self._read, len(self._ids)


class GenerationProgress:
    """What one generation shows while it runs: how many layers the prompt is through, then its text
    or the number of its tokens.

    Args:
        label: what is being done.
        layers: of the model. They are counted on CPUs alone: a GPU computes them after the host has
            gone on.
        num_tokens: how many tokens follow at most.
        text: prints the tokens; None: they are counted.
        quiet: as in :class:`Progress`.
    """

    def __init__(
        self,
        label: str,
        layers: nn.ModuleList,
        num_tokens: int,
        text: TextStream | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self._progress = Progress(label, quiet=quiet)
        self._text = None if quiet else text
        self._num_tokens, self._done = num_tokens, 0
        self._hooks = []
        if not quiet and next(layers.parameters()).device.type == "cpu":
            for number, layer in enumerate(layers, start=1):
                news = f"{number} of {len(layers)} layers"
                self._hooks.append(
                    layer.register_forward_hook(lambda *_, news=news: self._progress.at(news))
                )

    def add(self, token: int) -> None:
        """A token has come."""
        self._unhook()
        self._done += 1
        if self._text is None:
            self._progress.at(f"{self._done} of {self._num_tokens} tokens")
        else:
            self._progress.close()
            self._text.add(token)

    def close(self) -> None:
        """Ends it; also where the generation has failed."""
        self._unhook()
        self._progress.close()
        if self._text is not None and self._done:
            self._text.close()

    def __enter__(self) -> GenerationProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _unhook(self) -> None:
        # With the first token: the layers of decoding must have none, to be recorded as graphs.
        while self._hooks:
            self._hooks.pop().remove()
