"""Loading takes little more memory than the weights: no second copy of the model, of a file or of a large tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_config

NUM_FILES = 16
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 8}

LOAD = """
import sys
from pathlib import Path
import torch
from devices.registry import open_device
from engine.models.registry import load_model
from engine.weights.source import open_source

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])

device, source = open_device("cpu", sys.argv[2]).device, open_source(Path(sys.argv[1]))
device.operators.linear(torch.ones(8, 8))(torch.ones(1, 8))
before = kilobytes("VmRSS")
model, report = load_model(source, torch.bfloat16, device, 128)
print((kilobytes("VmHWM") - before) * 1024, report.num_bytes)
"""


@pytest.fixture(scope="module")
def sharded_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random bf16 model of about 400 MB in 16 files."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("sharded")
    config = tiny_config("llama", num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, **SIZES)
    config.dtype, config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    config.save_pretrained(path)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in AutoModelForCausalLM.from_config(config).named_parameters()}
    names, placed = list(shapes), {}
    for index in range(NUM_FILES):
        file = f"model-{index + 1:05}-of-{NUM_FILES:05}.safetensors"
        part = names[index::NUM_FILES]
        save_file({name: torch.randn(shapes[name], dtype=torch.bfloat16) for name in part}, path / file)
        placed |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return path


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_loading_peaks_below_1_3_times_the_weights(sharded_path: Path, kernels: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(sharded_path), kernels], capture_output=True, text=True, check=True
    )
    peak, num_bytes = map(int, done.stdout.split())
    assert num_bytes > 380e6
    assert num_bytes <= peak < 1.3 * num_bytes, f"{peak / 1e6:.0f} MB for {num_bytes / 1e6:.0f} MB of weights"
