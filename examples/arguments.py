"""Types for argparse: what is not allowed is told in a line, before anything runs."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def at_least(least: int) -> Callable[[str], int]:
    """Whole numbers from `least` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is no whole number") from error
        if value < least:
            raise ArgumentTypeError(f"it must be {least} or more, got {text}")
        return value

    return parse


def positive(text: str) -> float:
    """Numbers above 0, infinity among them."""
    try:
        value = float(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is no number") from error
    if not value > 0:
        raise ArgumentTypeError(f"it must be above 0, got {text}")
    return value


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ArgumentTypeError(f"there is no {text!r}, only {', '.join(choices)}")
        return text

    return parse


def several(kind: Callable[[str], T], least: int = 1) -> Callable[[str], list[T]]:
    """At least so many of a kind, with commas between them."""

    def parse(text: str) -> list[T]:
        values = [kind(each) for each in text.split(",") if each]
        if len(values) < least:
            raise ArgumentTypeError(f"at least {least} must be named")
        return values

    return parse


def directory(text: str) -> Path:
    """Makes it: what took long to compute shall not be lost in the end."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(f"{path} can't be made a directory: {error.strerror}") from error
    return path
