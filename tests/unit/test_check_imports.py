"""The import rules, each broken once in a small copy of the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_imports, check_sources

CLEAN = {
    "ddpcomm/__init__.py": "from ddpcomm.ddp import DistributedDataParallel\n",
    "ddpcomm/errors.py": "",
    "ddpcomm/env.py": "import os\nvalue = os.environ.get('DDPCOMM_X')\n",
    "ddpcomm/layout.py": "from ddpcomm.errors import DDPCommError\n",
    "ddpcomm/buckets.py": "import torch\nfrom ddpcomm import layout, ops\n",
    "ddpcomm/ops.py": "import torch\nfrom ddpcomm import _native\n",
    "ddpcomm/reducer.py": "from ddpcomm.buckets import Bucket\nfrom ddpcomm.comm.base import Work\nfrom ddpcomm import helper\n",
    "ddpcomm/helper.py": "import os\nfrom torch.nn.parallel.scatter_gather import gather\npath = os.path.join('a', 'b')\n",
    "ddpcomm/ddp.py": "from ddpcomm.reducer import Reducer\n",
    "ddpcomm/comm/__init__.py": "",
    "ddpcomm/comm/base.py": "import torch\n",
    "ddpcomm/comm/process_group.py": "import torch.distributed as dist\nfrom ddpcomm.comm.base import Work\nfrom . import base\n",
    "kernels/flatten.py": "import torch\nfrom ddpcomm.kernels import reference\n",
    "kernels/reference.py": "import torch\n",
    "csrc/cpu/flatten.cpp": '#include "ddpcomm/flatten.h"\n#include <vector>\n',
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    write(tmp_path, CLEAN)
    assert list(check_imports.problems(tmp_path)) == []


@pytest.mark.parametrize(
    ("file", "added", "message"),
    [
        ("ddpcomm/layout.py", "import torch.nn", "layout.py:2: uses torch.nn"),
        ("ddpcomm/layout.py", "from ddpcomm.buckets import Bucket", "ddpcomm.layout must not reach ddpcomm.buckets"),
        ("ddpcomm/buckets.py", "def late():\n    from ddpcomm import reducer", "ddpcomm.buckets must not reach ddpcomm.reducer"),
        ("ddpcomm/helper.py", "import ddpcomm.ddp", "ddpcomm.reducer -> ddpcomm.helper -> ddpcomm.ddp"),
        ("ddpcomm/comm/base.py", "from ..reducer import Reducer", "ddpcomm.comm.base must not reach ddpcomm.reducer"),
        ("ddpcomm/ops.py", "from ddpcomm.comm import base", "ddpcomm.ops must not reach ddpcomm.comm.base"),
        ("ddpcomm/helper.py", "import torch.distributed", "helper.py:4: uses torch.distributed"),
        ("ddpcomm/helper.py", "from torch import distributed as dist", "uses torch.distributed"),
        ("ddpcomm/helper.py", "from torch.distributed import ReduceOp", "uses torch.distributed.ReduceOp"),
        ("ddpcomm/helper.py", "from torch.nn.parallel import DistributedDataParallel", "uses torch.nn.parallel"),
        ("ddpcomm/helper.py", "from torch.nn import parallel\nparallel.DistributedDataParallel", "uses torch.nn.parallel.Distributed"),
        ("ddpcomm/helper.py", "import os as system\nsystem.environ['X']", "helper.py:5: uses os.environ"),
        ("ddpcomm/helper.py", "import torch\ngroup = torch.distributed.group", "helper.py:5: uses torch.distributed"),
        ("ddpcomm/helper.py", "import importlib\nimportlib.import_module('torch.distributed')", "uses torch.distributed"),
        ("ddpcomm/helper.py", "value = os.environ['X']", "uses os.environ"),
        ("ddpcomm/helper.py", "from os import getenv", "uses os.getenv"),
        ("kernels/flatten.py", "import os\nvalue = os.getenv('X')", "flatten.py:4: uses os.getenv"),
        ("kernels/flatten.py", "from ddpcomm import errors", "imports ddpcomm.errors; kernels import nothing"),
        ("csrc/cpu/flatten.cpp", "#  include <ATen/ATen.h>", "flatten.cpp:3: includes torch"),
    ],
)
def test_each_rule_is_enforced(tmp_path: Path, file: str, added: str, message: str) -> None:
    write(tmp_path, {**CLEAN, file: CLEAN[file] + added + "\n"})
    assert message in "\n".join(check_imports.problems(tmp_path))


def test_long_and_unfinished_files_are_found(tmp_path: Path) -> None:
    write(tmp_path, {"ddpcomm/long.py": "\n" * 401, "ddpcomm/half.py": "raise NotImplementedError\n", "tests/fine.py": "# TODO\n" * 400})
    found = list(check_sources.problems(tmp_path))
    assert [line.split(";")[0] for line in found] == ["ddpcomm/half.py:1: NotImplementedError", "ddpcomm/long.py: 401 lines"]
