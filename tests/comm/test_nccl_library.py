"""The thin layer over libnccl: the real library, which loads without a driver, and a stand-in in C that shows what would reach it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")

SOURCE = Path(__file__).with_name("fake_nccl.c")
Load = Callable[..., dict[str, Any]]


def run(library: str, what: str, **environment: str) -> dict[str, Any]:
    """What Nccl4pyLibrary makes of a libnccl, in a process of its own."""
    command = [sys.executable, "-m", "tests.comm.nccl_library_calls", library, what]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- the real one ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> str:
    path = pytest.importorskip("nccl.bindings.nccl").get_library_path()
    if path is None:
        pytest.skip("no libnccl is installed")
    return str(path)


def test_the_real_library_loads_without_a_driver(real: str) -> None:
    found = run(real, "load")
    assert found["path"] == real
    assert tuple(found["version"]) >= (2, 21, 0)
    assert found["identifiers"] == [128, True]
    assert {"ncclMemAlloc", "ncclCommRegister"} <= set(found["has"])
    assert "ncclNone" not in found["has"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_real_library_says_what_it_lacks(real: str) -> None:
    error = run(real, "start")["error"]
    assert error.startswith("CommunicationError: comm_init_rank_config: libnccl ")
    assert "cuda" in error.lower()


def test_the_configuration_structure_is_the_one_that_the_library_knows(real: str) -> None:
    """Size, magic number, version, and every field at the value that means "not set"."""
    nccl = pytest.importorskip("nccl.bindings.nccl")
    from ddpcomm.comm.nccl_options import NcclOptions

    config = nccl.Config()
    assert config.magic == 0xCAFEBEEF
    assert config.size_ == nccl.config_dtype.itemsize
    unset = -(2**31)
    for name in NcclOptions().config((2, 32, 3)).keys() - {"blocking"}:
        assert getattr(config, name) == unset
    options = NcclOptions(max_ctas=4, traffic_class=0, net_name="Socket", communicators=2)
    for name, value in options.config((2, 32, 3)).items():
        setattr(config, name, value)
        assert getattr(config, name) == value
    assert config.min_ctas == unset


# ---- one that writes down what it is given --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """Makes every call on a libnccl in C; returns what came back and what arrived."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    directory = tmp_path_factory.mktemp("fake_nccl")

    def call(
        *, old: bool = False, version: str = "23203", what: str = "every_call", **environment: str
    ) -> tuple[dict[str, Any], list[str]]:
        library = directory / ("old" if old else "new") / "libnccl.so.2"
        library.parent.mkdir(exist_ok=True)
        flags = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", *(["-DOLD"] if old else [])]
        subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True, timeout=60)
        log = directory / "log"
        log.write_text("")
        found = run(str(library), what, FAKE_NCCL_LOG=str(log), FAKE_NCCL_VERSION=version, **environment)
        return found, log.read_text().splitlines()

    return call


def test_what_reaches_libnccl(fake: Callable[..., tuple[dict[str, Any], list[str]]]) -> None:
    found, arrived = fake()
    assert arrived == [
        "start rank 3 of 8, id uu, magic cafebeef, blocking 0, min_ctas unset, max_ctas 4, traffic_class 9, net IB, name x, order 1",
        "scaled sum by 0.25, type 7, residence 1",
        "scaled sum by 0.125, type 8, residence 1",
        "all_reduce in place, 5 of type 9, op 512, comm 0xc0ffee, stream 0x57",
        "broadcast in place, 7 of type 1 from 2, stream 0x57",
        "all_gather 1 of type 2, from 1 to 2, stream 0x57",
        "reduce_scatter 1 of type 2, op 2, from 2 to 1, stream 0x57",
        "allocate 4096",
        "register 0x1000, 4096",
        "deregister 0xaa",
        "window 0x1000, 4096, flags 1",
        "close window 0xbb",
        "shrink without 2 ranks, the first 1, max_ctas 2, flags 1",
        "abort 0xdad",
        "revoke 0",
        "free 0x1000",
        "destroy op 512",
        "finalize",
        "destroy 0xc0ffee",
    ]
    assert found["version"] == [2, 32, 3]
    assert (found["registered"], found["window"], found["memory"]) == (True, True, 103)
    assert found["finalize"] == "PeerLostError: comm_finalize: libnccl 2.32.3: remote error (a cable was pulled)"


def test_a_null_handle_counts_as_none(fake: Callable[..., tuple[dict[str, Any], list[str]]]) -> None:
    found, _ = fake(FAKE_NCCL_NO_REGISTER="1")
    assert (found["registered"], found["window"]) == (False, False)


def test_an_old_library_still_works(fake: Callable[..., tuple[dict[str, Any], list[str]]]) -> None:
    """2.21 has neither windows nor the function by which nccl4py's own Communicator starts."""
    found, arrived = fake(old=True, version="22105")
    assert found["version"] == [2, 21, 5]
    assert found["has"] == ["ncclMemAlloc", "ncclCommRegister"]
    assert arrived[-1] == "destroy 0xc0ffee"


@pytest.mark.parametrize("version", ["22005", "2708"])
def test_a_library_that_is_too_old_is_refused(fake: Callable[..., tuple[dict[str, Any], list[str]]], version: str) -> None:
    error = fake(version=version, what="load")[0]["error"]
    assert error.startswith("TransportUnavailableError: libnccl 2.")
    assert "needs 2.21.0 or newer" in error
