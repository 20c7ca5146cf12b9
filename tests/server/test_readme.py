"""The README's curl example, run as it stands against a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_curl_example_answers(smollm2_server):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    [block] = [block for block in re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL) if "curl" in block]
    command = block[block.index("curl") :].replace("localhost:30000", smollm2_server.url.removeprefix("http://"))
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(ended.stdout)["choices"][0]["message"]["content"] == "The capital of France is Paris."
