"""What the package says of itself."""

from __future__ import annotations

import importlib.metadata

import ddpcomm


def test_version_is_that_of_the_installed_package() -> None:
    assert ddpcomm.__version__ == importlib.metadata.version("ddpcomm")
