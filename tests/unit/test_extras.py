"""The extras that `make setup` installs follow the NVIDIA driver."""

from __future__ import annotations

import pytest

from tools.extras import extras, major_version


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "dev,without-gpu"),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  gcc 12.2.0\n",
            "dev,cu12",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n", "dev,cu13"),
        ("570.133\n570.133\n", "dev,cu12"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "dev,without-gpu"),
    ],
)
def test_extras_follow_the_driver(text: str, expected: str) -> None:
    assert extras(major_version(text)) == expected
