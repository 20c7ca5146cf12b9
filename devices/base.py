"""What the engine may ask of a device: a frozen set of capabilities and six small protocols.

Code above `devices/` asks `Capabilities`, never a device's name. Everything in it defaults to "no", so a device that
forgets to declare something is refused where it matters instead of computing something wrong. `Device` opens memory
and attention, `AttentionBackend` computes attention over paged KV, `Operators` the rest of a decoder layer, a
`CapturedGraph` is a whole decode step. Nothing here imports torch: the scheduler reads capabilities too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from devices.pages import IntArray
from devices.sampling import Sampler

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from devices.quantized import QuantizedWeight

ResumeUnit = Literal["token", "page"]
MaskKind = Literal["causal", "window"]
KernelChoice = Literal["auto", "torch", "deterministic"]
"""The device's best kernels; its plain torch forms; or kernels with which a result never depends on what else is in the
step, to the last bit."""

Linear = Callable[["torch.Tensor"], "torch.Tensor"]
"""`y = x W^T + b`: [tokens, in] -> [tokens, out]."""


class UnsupportedPageSize(ValueError):
    """The device's attention is not known to be correct with this page size."""

    def __init__(self, page_size: int, device: str, supported: tuple[int, ...]) -> None:
        self.page_size, self.supported = page_size, supported
        sizes = ", ".join(map(str, supported)) or "none"
        nearest = min(supported, key=lambda size: abs(size - page_size), default=0)
        super().__init__(
            f"page_size={page_size} is not supported by device {device!r}: its attention is correct with {sizes}; "
            f"use --page-size {nearest}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a device does *correctly*.

    Attributes:
        page_sizes: page sizes, in tokens, that every attention path of the device accepts and computes right.
        default_page_size: the one to use when nobody says.
        resume_unit: where a computation may continue from existing KV: any token, or a page border only.
        dtypes, kv_dtypes: names of torch dtypes for weights and activations, and for KV; the first is preferred.
        slot_dtype, table_dtype: integer types that its kernels want for slots and page tables.
        masks: attention masks that it computes: "window" is causal over the last tokens (`Device.attention`).
        graph_capture, overlap: whether a step can be captured, and planned while another runs.
        graph_buckets: numbers of rows worth a graph of their own, ascending; a step is padded to the next one.
        graph_streams: what all graphs together may take of a scarce resource, of which a graph takes one and one more
            for each attention layer; 0: it is not scarce.
        collectives: name of its communication library.
    """

    page_sizes: tuple[int, ...] = ()
    default_page_size: int = 0
    resume_unit: ResumeUnit = "page"
    dtypes: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    slot_dtype: str = ""
    table_dtype: str = ""
    masks: frozenset[MaskKind] = frozenset()
    graph_capture: bool = False
    graph_buckets: tuple[int, ...] = ()
    graph_streams: int = 0
    overlap: bool = False
    collectives: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of a device in bytes: what it has, and what could be taken now."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Paged keys and values of one attention layer, in the device's own layout.

    Attributes:
        k, v: tensors with one page dimension; only the device that made them knows the rest of their layout.
        index: number of the layer in the model.
    """

    k: torch.Tensor
    v: torch.Tensor
    index: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step as attention sees it; prefill, chunk, decode and verify differ in `query_lens` alone.

    Attributes:
        query_lens: new tokens of each request, int32 [batch], host; their sum is the step's number of tokens.
        seq_lens: readable tokens of each request once this step has written its own, int32 [batch], host.
        page_tables: page ids of each request, int32 [batch, pages], on the device; padding is page 0.
        slots: where the new tokens' keys and values go, int64 [tokens], host, in the order of the tokens.
        page_size: tokens in a page.
        mask: which of the readable tokens a new token attends to.
    """

    query_lens: IntArray
    seq_lens: IntArray
    page_tables: torch.Tensor
    slots: npt.NDArray[np.int64]
    page_size: int
    mask: MaskKind = "causal"


class AttentionBackend(Protocol):
    """Attention over paged KV for one group of layers (all layers that share page tables and geometry)."""

    def plan(self, step: AttentionMetadata) -> None:
        """Prepare what all layers of the group share in this step.

        After a `Device.capture` the tensors that the plan before it made are the graph's: a further plan, of as many
        rows and of tables that are not wider, writes into them.
        """
        ...

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KvLayer) -> torch.Tensor:
        """Store the new keys and values, then attend.

        Args:
            q: [tokens, num_heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim].
        Returns:
            [tokens, num_heads, head_dim], in the dtype of `q`.
        """
        ...


class CapturedGraph(Protocol):
    """A decode step recorded once, to be launched as one piece; its inputs and outputs are the tensors of then."""

    def replay(self, step: AttentionMetadata) -> None:
        """Launch it for `step`, which every backend of the graph has planned; what it takes from the host besides
        tensors is brought up to date first."""
        ...


class GraphsUnsupported(RuntimeError):
    """A device was asked to capture a step, and its capabilities say that it cannot."""

    def __init__(self, device: str) -> None:
        super().__init__(f"device {device!r} captures no graphs (Capabilities.graph_capture is False)")


class NoRoomForGraph(RuntimeError):
    """The device has no memory, streams or events left for one more captured step; those it has stay usable."""


class Operators(Protocol):
    """What a decoder computes beside attention. Weights, activations and results are of one dtype, except where
    another is said; inputs may be views whose rows are not contiguous and are never written."""

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        """A product with a loaded weight; called once for each, so a device may put it into a form of its own.

        Args:
            weight: [out, in]; bias: [out].
            out_dtype: of the results, when not that of the weight.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / rms(x) * weight` over the last dimension (RMSNorm, arXiv:1910.07467), computed in fp32."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + residual`, and that sum; all [tokens, size]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of the halves of `gate_up` [tokens, 2 * size] (SwiGLU, arXiv:2002.05202)."""
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turn the pairs (i, i + dim / 2) of `x` [tokens, heads, dim]; cos, sin: float32 [tokens, dim / 2]."""
        ...

    def norm_linear(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, linear: Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`linear` of the norm of `x + residual`, and that sum."""
        ...

    def linear_norm(
        self, x: torch.Tensor, residual: torch.Tensor, linear: Linear, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `linear(x) + residual`, and that sum."""
        ...

    def gated_mlp(self, x: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        """`down(silu_mul(gate_up(x)))`."""
        ...

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest number of each row of float32 [rows, vocab_size], and its first place, int64; both [rows].

        NaN is larger than everything.
        """
        ...


class PackedWeight(Protocol):
    """A weight [out, in] in a device's own form, made for activations of one dtype."""

    @property
    def num_bytes(self) -> int: ...

    def linear(self, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> Linear:
        """See `Operators.linear`."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as an embedding has them, [tokens, in]; ids: int64 [tokens].

        Raises:
            IndexError: there is no such row.
        """
        ...


Pack = Callable[["QuantizedWeight | torch.Tensor", "torch.dtype"], PackedWeight | None]
"""Takes a weight [out, in] over, for activations of a dtype; None: a tensor that is best left as it is. A weight of few
bits is always taken."""


class Device(Protocol):
    """One opened device."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """One line for people: hardware and library versions."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def operators(self) -> Operators: ...

    @property
    def sampler(self) -> Sampler | None: ...

    @property
    def pack(self) -> Pack | None:
        """None: it has no products with weights of few bits, and reads tensors as they are."""
        ...

    def memory(self) -> MemoryInfo: ...

    def stage(self, array: npt.NDArray[Any], into: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor on the device with the array's values for all that is launched after the next `send`.

        What a step needs of the host is staged piece by piece and copied as one (`devices.cuda.upload`), or at once
        where a device gains nothing by that.

        Args:
            array: numbers; the tensor has its shape and dtype, and may share its memory.
            into: a tensor on the device that takes the values over, and is returned.
        """
        ...

    def send(self) -> None:
        """Copy what was staged to the device, behind what was launched before; nothing waits for it."""
        ...

    def kv_layer(
        self, index: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KvLayer:
        """Zeroed KV of one layer for `num_pages` pages (the padding page included) in the device's layout.

        Raises:
            ValueError: more than its attention can address; the text says how many tokens are not.
        """
        ...

    def attention(
        self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None
    ) -> AttentionBackend:
        """An attention backend for layers of this shape, softmax scale `head_dim ** -0.5`.

        Args:
            window: a token attends to itself and the `window - 1` tokens before it; None attends to all.
        Raises:
            ValueError: heads that it cannot compute.
        """
        ...

    def copy_page(self, layers: Sequence[KvLayer], source: int, target: int) -> None:
        """Copy one page's keys and values in every layer, after what was launched before; done with the next `send`."""
        ...

    def capture(self, run: Callable[[], None], backends: Sequence[AttentionBackend], num_rows: int) -> CapturedGraph:
        """Record what `run` launches; only called when the capabilities have `graph_capture`.

        Args:
            run: computes a step of one new token for each of `num_rows` rows on tensors that stay; it is called more
                than once, so the step must be one whose repetition does no harm.
            backends: those that `run` uses; each has planned that step, with the widest page tables there will be.
        Raises:
            GraphsUnsupported; NoRoomForGraph.
        """
        ...

    def download(self, results: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy `results` to the host, behind what was launched before.

        Returns:
            Waits for that copy, and for nothing launched later; gives a tensor on the host.
        """
        ...

    def synchronize(self) -> None:
        """Wait until everything launched so far is done."""
        ...


def check_page_size(page_size: int, device: str, capabilities: Capabilities) -> int:
    """`page_size`, or UnsupportedPageSize with the sizes that are."""
    if page_size not in capabilities.page_sizes:
        raise UnsupportedPageSize(page_size, device, capabilities.page_sizes)
    return page_size
