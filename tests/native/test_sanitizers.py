"""csrc/ under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: the programs beside this file, compiled here.

`make sanitize` runs these alone; DDPCOMM_FUZZ_ROUNDS makes the fuzzing longer there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent.parent / "csrc"
COMPILER = os.environ.get("CXX", "g++")

# The generated code has to be that of the release: no contraction. Warnings are for the real build.
FLAGS = ("-std=c++17", "-O1", "-g1", "-w", "-pthread", "-ffp-contract=off", f"-I{SOURCES / 'include'}", f"-I{HERE}")
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-fsanitize=thread",)
REPORTS = {
    # Leak checks can't run under a debugger; stack-use-after-return misaligns 512-bit vectors (GCC bug 110027).
    "ASAN_OPTIONS": "detect_leaks=0:strict_string_checks=1:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


class Builder:
    """Compiles each source once for each sanitizer, as many at a time as there are cores."""

    def __init__(self, directory: Path, sanitizer: tuple[str, ...]) -> None:
        self.directory = directory
        self.sanitizer = sanitizer
        directory.mkdir(exist_ok=True)
        probe = directory / "probe.cpp"
        probe.write_text("int main() {}")
        command = [COMPILER, *sanitizer, str(probe), "-o", str(directory / "probe")]
        if shutil.which(COMPILER) is None:
            pytest.skip(f"there is no compiler {COMPILER}")
        if self._run(command).returncode or self._run([str(directory / "probe")]).returncode:
            pytest.skip(f"{COMPILER} can't build, or this machine can't run, {' '.join(sanitizer)}")

    def build(self, name: str, *sources: Path) -> Path:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # The longest first, lest one of them runs alone at the end.
            objects = list(pool.map(self._compile, sorted(sources, key=lambda path: "reduce_" not in path.name)))
        program = self.directory / name
        self._check([COMPILER, *FLAGS, *self.sanitizer, *map(str, objects), "-o", str(program)])
        return program

    def run(self, program: Path, *arguments: str) -> str:
        return self._check([str(program), *arguments])

    def _compile(self, source: Path) -> Path:
        target = self.directory / f"{source.stem}.o"
        if not target.exists():
            self._check([COMPILER, *FLAGS, *self.sanitizer, "-c", str(source), "-o", str(target)])
        return target

    @staticmethod
    def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | REPORTS
        return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)

    def _check(self, command: list[str]) -> str:
        done = self._run(command)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def library(prefix: str = "") -> list[Path]:
    found = sorted((SOURCES / "cpu").glob(f"{prefix}*.cpp"))
    assert found
    return found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("address"), ADDRESS)


def test_segments_and_layouts_of_garbage(address: Builder) -> None:
    """The libFuzzer target, under a driver of our own."""
    parts = ("shared_memory_header.cpp", "layout.cpp")
    program = address.build("fuzz", HERE / "fuzz_driver.cpp", HERE / "fuzz_segment.cpp", *(SOURCES / "cpu" / part for part in parts))
    rounds = os.environ.get("DDPCOMM_FUZZ_ROUNDS", "300000")
    assert f"{rounds} inputs passed" in address.run(program, rounds)


def test_kernels_stay_within_their_memory(address: Builder) -> None:
    assert "kernels, baseline: passed" in address.run(address.build("kernels", HERE / "kernels.cpp", *library()))


def test_channel_stays_within_its_memory(address: Builder) -> None:
    assert "channel: passed" in address.run(address.build("channel", HERE / "channel.cpp", *library()))


def test_channel_has_no_races(tmp_path: Path) -> None:
    builder = Builder(tmp_path, THREAD)
    sources = [path for path in library("shared_memory") if "_avx" not in path.name]
    program = builder.build("channel", HERE / "channel.cpp", HERE / "baseline_only.cpp", SOURCES / "cpu" / "isa.cpp", *sources)
    assert "channel: passed" in builder.run(program)


def test_a_sanitizer_finds_what_it_is_there_for(address: Builder, tmp_path: Path) -> None:
    """Else a build without its checks would pass everything."""
    source = tmp_path / "wrong.cpp"
    source.write_text('#include "ddpcomm/copy.h"\nint main(int n, char**) { char* p = new char[4]; return p[3 + n]; }')
    program = address.build("wrong", source)
    with pytest.raises(AssertionError, match=r"heap-buffer-overflow|insufficient space"):
        address.run(program)
