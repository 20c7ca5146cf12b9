"""Loading: every parameter exactly once, every tensor used, nothing cut to fit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.errors import ModelLoadError
from engine.models.config import ModelConfig
from engine.models.rope_config import RopeConfig
from engine.weights.loader import LoadReport, load_weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=4,
    hidden_size=3,
    intermediate_size=3,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    max_position_embeddings=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig("default", 1e4),
    tie_word_embeddings=False,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    windows=(None,),
    moe=None,
    hidden_act="silu",
    bos_token_id=None,
    eos_token_ids=(),
    saved_dtype="float32",
)


class ListSource:
    """A `WeightSource` of given pairs; `listed` is what it claims to hold."""

    def __init__(self, pairs: list[tuple[str, torch.Tensor]], listed: set[str] | None = None) -> None:
        self.config, self.path = CONFIG, Path("/models/tiny")
        self._pairs = pairs
        self._listed = frozenset(dict(pairs) if listed is None else listed)

    def names(self) -> frozenset[str]:
        return self._listed

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._pairs


def source_of(**tensors: torch.Tensor) -> ListSource:
    return ListSource(list(tensors.items()))


def test_tensors_are_copied_into_views_of_a_fused_weight():
    fused = torch.full((5, 3), torch.nan)
    q, k = torch.randn(3, 3), torch.randn(2, 3)
    report = load_weights({"q": fused[:3], "k": fused[3:]}, source_of(k=k, q=q))
    assert torch.equal(fused, torch.cat([q, k]))
    assert (report.num_tensors, report.num_bytes) == (2, 5 * 3 * 4)
    assert isinstance(report, LoadReport)
    assert report.seconds > 0


@pytest.mark.parametrize("saved", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted(saved, wanted):
    values, destination = torch.randn(4, 3).to(saved), torch.zeros(4, 3, dtype=wanted)
    load_weights({"w": destination}, source_of(w=values))
    assert torch.equal(destination, values.to(wanted))


def test_a_parameter_that_requires_grad_is_filled():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    load_weights({"w": parameter}, source_of(w=torch.ones(2, 2)))
    assert torch.equal(parameter.detach(), torch.ones(2, 2))
    assert parameter.grad_fn is None


def test_empty_and_scalar_parameters_are_filled():
    scalar = torch.tensor(0.0)
    load_weights(
        {"s": scalar, "e": torch.zeros(3, 0, dtype=torch.float16)}, source_of(s=torch.tensor(2.5), e=torch.zeros(3, 0))
    )
    assert scalar == 2.5


def test_progress_counts_tensors_up_to_all_of_them():
    calls: list[tuple[int, int]] = []
    destinations = {name: torch.zeros(1) for name in "abc"}
    load_weights(destinations, source_of(**destinations), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_saved_rope_frequencies_and_empty_surplus_tensors_are_skipped():
    tensors = {"w": torch.ones(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "x": torch.zeros(0)}
    assert load_weights({"w": torch.zeros(1)}, source_of(**tensors)).num_tensors == 1


def test_missing_tensors_are_listed_with_the_shape_they_need_and_what_is_there_instead():
    destinations = {"w": torch.zeros(1), "v": torch.zeros(4, 3)}
    message = r"/models/tiny: 1 of 2 parameters are not in the file: v \[4, 3\]; 1 tensors in it are no parameter: u"
    with pytest.raises(ModelLoadError, match=message):
        load_weights(destinations, source_of(w=torch.ones(1), u=torch.ones(2)))


def test_at_most_eight_missing_names_are_listed_with_the_count_of_all():
    destinations = {f"w{i:02}": torch.zeros(1) for i in range(20)}
    with pytest.raises(ModelLoadError, match=r"20 of 20 parameters.*w07 \[1\] and 12 more") as error:
        load_weights(destinations, source_of())
    assert "w08" not in str(error.value)


@pytest.mark.parametrize("surplus", [torch.ones(2, 2), torch.tensor(1.0)])
def test_a_tensor_that_is_no_parameter_is_refused_with_its_shape(surplus):
    with pytest.raises(ModelLoadError, match=r"1 tensors cannot be loaded: model.layers.1.x \[.*\] is no parameter"):
        load_weights({"w": torch.zeros(1)}, source_of(**{"w": torch.ones(1), "model.layers.1.x": surplus}))


@pytest.mark.parametrize(
    ("found", "needed"), [((1, 3), (4, 3)), ((3,), (4, 3)), ((12,), (4, 3)), ((), (1,)), ((4, 3), (3, 4))]
)
def test_another_shape_is_refused_with_both_and_never_broadcast(found, needed):
    destination = torch.zeros(needed)
    with pytest.raises(ModelLoadError) as error:
        load_weights({"w": destination}, source_of(w=torch.ones(found)))
    assert f"w has shape {list(found)}, needs {list(needed)}" in str(error.value)
    assert not destination.any()


def test_at_most_eight_wrong_shapes_are_listed_with_the_count_of_all():
    names = [f"w{i:02}" for i in range(11)]
    with pytest.raises(ModelLoadError, match=r"11 tensors cannot be loaded: .*w07 has shape.* and 3 more"):
        load_weights({name: torch.zeros(2) for name in names}, source_of(**{name: torch.zeros(3) for name in names}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int64])
def test_quantised_tensors_are_not_taken_for_weights(dtype):
    with pytest.raises(ModelLoadError, match=f"w has dtype {dtype}"):
        load_weights({"w": torch.zeros(4)}, source_of(w=torch.ones(4).to(dtype)))


def test_a_tensor_that_comes_twice_is_refused():
    with pytest.raises(ModelLoadError, match="holds w twice"):
        load_weights({"w": torch.zeros(1)}, ListSource([("w", torch.ones(1)), ("w", torch.ones(1))]))


@pytest.mark.parametrize("listed", [{"w", "v"}, {"w"}])
def test_a_source_that_does_not_yield_what_it_lists_is_refused(listed):
    pairs = [("w", torch.ones(1))] + ([("inv_freq", torch.zeros(0))] if listed == {"w"} else [])
    with pytest.raises(ModelLoadError, match=r"listed but not found, or the reverse: (v|inv_freq)"):
        load_weights({name: torch.zeros(1) for name in listed}, ListSource(pairs, listed))


@pytest.mark.parametrize(("saved", "big"), [(torch.float32, 1e5), (torch.bfloat16, 1e38), (torch.float64, -7e4)])
def test_values_that_float16_cannot_hold_are_counted_and_refused(saved, big):
    values = torch.tensor([[1.0, big, 65504.0], [big, -torch.inf, torch.nan]], dtype=torch.float64).to(saved)
    infinite_after = 3 if saved == torch.bfloat16 else 2  # bfloat16 rounds 65504 up to 65536
    with pytest.raises(ModelLoadError, match=f"w has {infinite_after} values beyond 65504, the largest torch.float16"):
        load_weights({"w": torch.zeros(2, 3, dtype=torch.float16)}, source_of(w=values))


@pytest.mark.parametrize("value", [65520.0, -65520.0])
def test_one_value_too_large_on_either_side_is_refused(value):
    with pytest.raises(ModelLoadError, match="w has 1 values beyond 65504"):
        load_weights({"w": torch.zeros(2, dtype=torch.float16)}, source_of(w=torch.tensor([1.0, value])))


def test_a_value_that_float16_rounds_down_to_its_largest_is_kept():
    destination = torch.zeros(1, dtype=torch.float16)
    load_weights({"w": destination}, source_of(w=torch.tensor([65519.0])))
    assert destination == 65504


def test_values_that_bfloat16_rounds_to_infinity_are_refused():
    with pytest.raises(ModelLoadError, match=r"w has 1 values beyond .*bfloat16"):
        load_weights({"w": torch.zeros(1, dtype=torch.bfloat16)}, source_of(w=torch.tensor([3.4e38])))


def test_infinities_of_the_file_itself_are_kept():
    destination = torch.zeros(2, dtype=torch.float16)
    load_weights({"w": destination}, source_of(w=torch.tensor([torch.inf, -1.0])))
    assert destination.tolist() == [torch.inf, -1.0]


@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_in_files_with_and_without_one(tied, has_head, equal, head_first, caplog):
    embedding = torch.randn(4, 3)
    head = embedding.clone() if equal else torch.randn(4, 3)
    pairs = [(EMBEDDING, embedding)] + ([(HEAD, head)] if has_head else [])
    source = ListSource(pairs[::-1] if head_first else pairs)
    loaded = torch.zeros(4, 3, dtype=torch.bfloat16)
    loaded_head = loaded if tied else torch.zeros(4, 3, dtype=torch.bfloat16)
    destinations = {EMBEDDING: loaded} if tied else {EMBEDDING: loaded, HEAD: loaded_head}
    optional = {HEAD} if tied else set()
    if not tied and not has_head:
        with pytest.raises(ModelLoadError, match=r"not in the file: lm_head.weight \[4, 3\]"):
            load_weights(destinations, source, optional=optional)
        return
    with caplog.at_level(logging.WARNING):
        load_weights(destinations, source, optional=optional)
    assert torch.equal(loaded, embedding.bfloat16())
    assert torch.equal(loaded_head, (embedding if tied else head).bfloat16())
    warned = [record for record in caplog.records if HEAD in record.getMessage()]
    assert len(warned) == (1 if tied and has_head and not equal else 0)


def test_a_tied_head_of_another_shape_is_warned_about_too(caplog):
    source = ListSource([(EMBEDDING, torch.ones(4, 3)), (HEAD, torch.ones(5, 3))])
    load_weights({EMBEDDING: torch.zeros(4, 3)}, source, optional={HEAD})
    assert "differs from model.embed_tokens.weight" in caplog.text
