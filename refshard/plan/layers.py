"""What one layer takes for one microbatch on one rank: its kernels, and the communication within the layer.

Tensor parallelism gathers a sublayer's input and scatters its sum, twice a layer; backward the other way round. Ranks
that share sequences pass keys and values round a ring during attention, or exchange heads for tokens before and after
it. Masks are causal, and halves of sequences are dealt so that all ranks have as much to do.

Sizes of collectives are bytes of the whole tensor, as records count them: the result of an all-gather, the input of a
reduction. A test holds them to dry runs of the real code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from refshard.costs import (
    GroupShape,
    attention_seconds,
    collective_cost,
    first_touch_seconds,
    move_seconds,
    product_seconds,
)
from refshard.plan.adapters import adapter_moves, adapter_products, dequantising_moves
from refshard.plan.cost_models import MASTER_BYTES
from refshard.plan.kernels import (
    Move,
    Product,
    Share,
    attention_linears,
    attention_width,
    backward_moves,
    bias_moves,
    expert_rows,
    feed_forward_linears,
    forward_moves,
    inner_tokens_width,
    product_of,
    projected_width,
    quantising_moves,
    unfused_moves,
)
from refshard.specs.cluster import ClusterSpec, CollectiveOp
from refshard.specs.hardware import LOW_BYTES
from refshard.specs.model import ModelSpec

Seconds = TypeVar("Seconds", float, npt.NDArray[np.float64])


def hidden(cluster: ClusterSpec, compute_s: Seconds, comm_s: Seconds) -> Seconds:
    """Seconds that ``comm_s`` of communication, begun at once, adds to ``compute_s`` of compute; each slows down the
    other. Takes numbers or arrays.
    """
    slowed, slower = cluster.compute_beside_communication, cluster.communication_beside_compute
    overlapped = comm_s / slower
    enough = compute_s >= slowed * overlapped
    rest = compute_s * (1 / slowed - 1) + comm_s - slower * compute_s / slowed
    return np.where(enough, (1 - slowed) * overlapped, rest)  # type: ignore[return-value]


Pass = Literal["forward", "backward", "again"]
"""Passes through a layer; ``again`` is the recomputation of checkpointed layers."""


@dataclass(frozen=True, slots=True)
class Issued:
    """As many collectives of one kind and size."""

    op: CollectiveOp
    nbytes: float
    count: float = 1


def around_products(model: ModelSpec, share: Share, which: Pass, *, dense: bool = True) -> tuple[Issued, ...]:
    """Within one layer over tensor-parallel ranks: a sublayer's input is gathered and its sum scattered, twice; the
    last sum is not computed again. Experts that other ranks divide get each rank's part of the sequence.
    """
    if share.tp == 1:
        return ()
    nbytes, experts = _stream(model, share), None if dense else model.experts
    if experts is not None and not experts.shared_ffn_dim and (share.ep > 1 or share.expert_split == 1):
        return Issued("all_gather", nbytes), Issued("reduce_scatter", nbytes)
    return Issued("all_gather", nbytes, 2), Issued("reduce_scatter", nbytes, 1 if which == "again" else 2)


def around_embedding(model: ModelSpec, share: Share, which: Pass) -> tuple[Issued, ...]:
    """Each tensor-parallel rank looks up its part of the vocabulary; the parts are summed."""
    if share.tp == 1:
        return ()
    return (Issued("reduce_scatter" if which == "forward" else "all_gather", _stream(model, share)),)


def around_head(model: ModelSpec, share: Share, which: Pass) -> tuple[Issued, ...]:
    """The head's input, and of each token the largest logit, the sum of the exponentials and the target's logit."""
    if share.tp == 1:
        return ()
    if which == "backward":
        return (Issued("reduce_scatter", _stream(model, share)),)
    return Issued("all_gather", _stream(model, share)), Issued("all_reduce", share.tokens * 4, 3)


def norm_gradients(model: ModelSpec, share: Share, element: int, norms: int = 2) -> tuple[Issued, ...]:
    """The gradients of a layer's norms; each covers its rank's part of the sequence."""
    return (Issued("all_reduce", model.dim * element, norms),) if share.tp > 1 else ()


def around_attention(model: ModelSpec, share: Share, which: Pass) -> tuple[Issued, ...]:
    """Torch's context parallelism: keys and values are gathered, their gradients go from rank to rank in fp32."""
    if share.cp == 1:
        return ()
    gathered = Issued("all_gather", share.cp * share.element * _key_value(model, share))
    if which != "backward":
        return (gathered,)
    return gathered, Issued("all_to_all", MASTER_BYTES * _key_value(model, share), share.cp)


def _stream(model: ModelSpec, share: Share) -> float:
    return share.tokens * model.dim * share.element


def _key_value(model: ModelSpec, share: Share) -> float:
    """Elements of a rank's keys and values."""
    return share.tokens * (projected_width(model) - model.n_heads * model.head_dim) / share.tp


CHUNKS = 4
"""Number of pieces of overlapped products and collectives; the first or the last piece runs alone."""
RING_PART = 0.69
"""The part of attention's rate that its kernels reach on the pieces of a ring: each piece is short, and results are
corrected in fp32."""
ROUTER_KERNELS, EXPERT_KERNELS, EACH_EXPERT, OVERLAP_KERNELS = 22.1, 9.58, 4.20, 50.3
"""Kernels that the host launches in a pass through a mixture beyond those that are priced: small ones that choose and
count, and those that send and sort. Transformer Engine casts operands to fp8 for each of the rank's experts, one after
the other. What overlaps another microbatch's compute takes the host as long as so many more."""
TILE = 128
"""Queries and keys of a tile of attention: of a window, whole tiles are computed (FlashAttention-3)."""
GROUPED_TILE_S = 5.64e-6
"""Seconds by which each tile of an expert's product takes longer, which also stands for what is moved around it. The
faster a multiprocessor computes, the larger a part that is."""
EAGER_PART = 0.88
"""The part of the memory's rate that torch's eager elementwise kernels reach; they also cast, broadcast and reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """How the ranks of one layer communicate.

    ``tensor_shape``, ``context_shape``, ``expert_shape`` and ``split_shape`` (ranks that split each expert) say how
    their groups lie on nodes. ``dispatch``, ``fp8_attention``, ``fp8_head``, ``fused_experts``, ``graphs`` and
    ``recomputes`` are those of :class:`~refshard.specs.job.Implementation`. ``overlaps``: products are cut into pieces
    that overlap tensor parallelism's collectives. ``exchanges``: heads are exchanged for tokens instead of a ring. With
    torch's ``dtensors``, the embedding's gradient is whole on each tensor-parallel rank, and the ring gathers keys and
    values at once.
    """

    tensor_shape: GroupShape
    context_shape: GroupShape
    expert_shape: GroupShape
    split_shape: GroupShape
    dispatch: Literal["copies", "copies-overlapped", "once", "once-overlapped"] = "copies"
    fp8_attention: bool = False
    fp8_head: bool = False
    fused_experts: bool = False
    graphs: Literal["none", "routers", "blocks", "steps"] = "none"
    recomputes: str = ""
    overlaps: bool = False
    exchanges: bool = False
    dtensors: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer and microbatch on one rank, including exposed communication within it.

    Backward computes the gradient of the input, ``input_s``, and those of the weights, ``weight_s``. ``full_s`` and
    ``selective_s`` are the recomputation if the layer is checkpointed, fully or by operator.
    """

    forward_s: float
    input_s: float
    weight_s: float
    full_s: float = 0.0
    selective_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Without recomputation."""
        return self.input_s + self.weight_s


class LayerCosts:
    """Times of the layers of one model on one cluster, for one rank's share of a microbatch."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, share: Share, within: Within) -> None:
        self._model, self._cluster, self._share, self._within = model, cluster, share, within
        self._hardware = cluster.accelerator

    def layer(self, *, dense: bool) -> LayerTimes:
        """A decoder block; a mixture of experts unless ``dense``."""
        model, share = self._model, self._share
        linears = [*attention_linears(model), *feed_forward_linears(model, dense=dense)]
        products = [product_of(model, linear, share) for linear in linears]
        product_s = [self._product(product, grouped=one.count > 1) for one, product in zip(linears, products)]
        forward = [*forward_moves(model, share, dense=dense)]
        backward = [*backward_moves(model, share, dense=dense)]
        if share.precision in LOW_BYTES:
            cast = [p for p in products if p.count == 1 or not self._within.fused_experts]
            forward += quantising_moves([p.m * p.k * p.count for p in cast])
            backward += quantising_moves([p.m * p.n * p.count for p in cast])
            if self._within.fp8_attention:
                width = share.tokens / share.tp * projected_width(model)
                values = share.tokens / share.tp * model.n_heads * attention_width(model)
                forward, backward = [*forward, *quantising_moves([width])], [*backward, *quantising_moves([values])]
        if not dense and share.ep > 1 and self._within.dispatch.startswith("copies"):
            # An all-to-all leaves tokens in the order of ranks, which the rank's experts do not have, and back.
            sorting = [Move(2 * share.element * expert_rows(model, share) * model.dim)] * 2
            forward, backward = forward + sorting, backward + sorting
        if not dense and model.experts is not None and model.experts.biased and not self._within.fused_experts:
            forward += bias_moves(model, share, backward=False)
            backward += bias_moves(model, share, backward=True)
        if share.fused and not self._within.dtensors:
            plain = dense or self._within.fused_experts
            forward += unfused_moves(model, share, dense=plain, backward=False)
            backward += unfused_moves(model, share, dense=plain, backward=True)
        attention, attention_back = (self._attention(backward=b) for b in (False, True))
        sent, returned = self._context(attention), self._context(attention_back, backward=True)
        moved = [*adapter_moves(model, share), *dequantising_moves(model, share)]
        adapters = [self._product(one) for one in adapter_products(model, share)]
        forward, backward = forward + moved, backward + moved
        around, again = (self._tensor(sum(product_s), which, dense=dense) for which in ("forward", "again"))
        kernels, own_s = len(products) + len(adapters) + 1, sum(product_s) + sum(adapters)
        device_s, last = own_s + attention + self._moves(forward), product_s[-1]
        forward_s = self._at_least_launched(device_s, kernels + len(forward), dense=dense)
        again_s = self._at_least_launched(device_s - last, kernels + len(forward) - 1, dense=dense)
        modules_s = self._modules_again({one.name: seconds for one, seconds in zip(linears, product_s)}, dense=dense)
        back_s = own_s + attention_back + self._moves(backward) + modules_s
        input_s = self._at_least_launched(back_s, kernels + len(backward), dense=dense)
        experts, experts_back = (0.0, 0.0) if dense else map(self._experts, (forward_s, input_s + sum(product_s)))
        comm = around + sent + experts
        return LayerTimes(
            forward_s=forward_s + comm,
            input_s=input_s + around + returned + experts_back,
            weight_s=sum(adapters if share.lora else product_s),
            full_s=again_s + comm - around + again,
            selective_s=sum(product_s[1::2]) - last * (len(product_s) % 2 == 0)
            + self._moves(forward) + again + experts,
        )  # fmt: skip

    def embedding(self) -> LayerTimes:
        """Looking up the tokens. Its gradient is dense."""
        share, model = self._share, self._model
        width = share.tokens * model.dim * share.element
        parts = 1 if self._within.dtensors else share.tp
        cleared = share.element * model.vocab * model.dim / parts
        return LayerTimes(
            forward_s=self._moves([Move(2 * width)]) + self._over_tensor(around_embedding(model, share, "forward")),
            input_s=0.0,
            weight_s=0.0 if share.lora else self._moves([Move(cleared, fresh=cleared), Move(3 * width)])
            + self._over_tensor(around_embedding(model, share, "backward")),
        )  # fmt: skip

    def head(self) -> LayerTimes:
        """Final norm, head and loss, the vocabulary divided by tensor-parallel ranks."""
        share, model = self._share, self._model
        logits = share.tokens * model.vocab / share.tp
        plain = not self._within.fp8_head
        product = self._product(Product(share.tokens, model.dim, model.vocab / share.tp), plain=plain)
        e = share.element
        if share.fused:
            loss, gradient = [Move(e * logits, logits)], [Move(2 * e * logits, logits)]
        else:
            loss = [Move((e + 4) * logits), Move(8 * logits, 2 * logits, 4 * logits)]
            gradient = [Move(4 * logits, fresh=4 * logits), Move(12 * logits, 1.5 * logits), Move((e + 4) * logits)]
        return LayerTimes(
            forward_s=product + self._moves(loss) + self._over_tensor(around_head(model, share, "forward")),
            input_s=product + self._moves(gradient) + self._over_tensor(around_head(model, share, "backward")),
            weight_s=0.0 if share.lora else product,
        )  # fmt: skip

    def _modules_again(self, product_s: dict[str, float], *, dense: bool) -> float:
        """Seconds of the modules that selective recomputation runs again."""
        model, share, names = self._model, self._share, self._within.recomputes.split(",")
        again = ["q up", "kv up"] * ("mla_up_proj" in names) + ["up", "down"] * ("mlp" in names and dense)
        moves = [Move(2 * share.element * share.tokens / share.tp * model.dim)] * (2 * ("layernorm" in names))
        if "moe_act" in names and not dense:
            inner = inner_tokens_width(model, share, dense=False)
            moves += [Move((3 if model.gated else 2) * share.element * inner, inner)]
            moves += [] if self._within.fused_experts else unfused_moves(model, share, dense=False, backward=False)[-1:]
        return sum(product_s.get(name, 0.0) for name in again) + self._moves(moves)

    def prediction(self) -> LayerTimes:
        """What a module of multi-token prediction computes besides its layer: the next tokens are looked up, two hidden
        states projected to one, and go through the head.
        """
        share, model = self._share, self._model
        product = self._product(Product(share.tokens, 2 * model.dim, model.dim / share.tp))
        embedding, head = self.embedding(), self.head()
        return LayerTimes(
            forward_s=embedding.forward_s + product + head.forward_s, input_s=product + head.input_s,
            weight_s=embedding.weight_s + (0.0 if share.lora else product) + head.weight_s,
        )  # fmt: skip

    def _attention(self, *, backward: bool) -> float:
        """Seconds of attention, averaged over layers with a window and layers without."""
        share, model = self._share, self._model
        length = share.seq_len
        heads = share.sequences * model.n_heads / share.tp / share.cp
        seconds = attention_seconds(
            self._hardware, share.dtype, heads=heads, seq_len=length, head_dim=round(attention_width(model)),
            backward=backward, kernel=share.attention, fp8=self._within.fp8_attention,
        )  # fmt: skip
        if share.cp > 1 and not self._within.exchanges:
            seconds /= RING_PART
        return seconds * seen_part(model, length)

    def _context(self, attention_s: float, *, backward: bool = False) -> float:
        """Exposed seconds of context parallelism."""
        share, shape = self._share, self._within.context_shape
        if share.cp == 1:
            return 0.0
        width = projected_width(self._model) / share.tp
        values = self._model.n_heads * attention_width(self._model) / share.tp
        if self._within.exchanges:
            moved = share.tokens * (width + values) * share.element
            return collective_cost(self._cluster, "all_to_all", round(moved), shape).seconds
        corrected = self._moves([Move(10 * share.tokens * values * share.cp)])
        if self._within.dtensors:
            return corrected + self._gathered_ring(attention_s, "backward" if backward else "forward")
        hop = (2 if backward else 1) * share.tokens * (width - values) * share.element
        hop_s = self._message(hop, shape)
        exposed = max(0.0, hop_s - attention_s / share.cp) * (share.cp - 1)
        return exposed + corrected

    def _gathered_ring(self, attention_s: float, which: Pass) -> float:
        """Torch's ring: keys and values are gathered during the first piece of attention, and the gradients of each
        piece are sent during the next one; those of the last piece overlap nothing.
        """
        share, piece_s, exposed = self._share, attention_s / self._share.cp, 0.0
        for one in around_attention(self._model, share, which):
            each = collective_cost(self._cluster, one.op, round(one.nbytes), self._within.context_shape).seconds
            exposed += one.count * max(0.0, each - piece_s) + (min(each, piece_s) if one.op == "all_to_all" else 0.0)
        return exposed

    def _message(self, nbytes: float, shape: GroupShape) -> float:
        """A message to the next rank of a group."""
        cluster = self._cluster
        if shape.nodes == 1:
            return cluster.launch_s + cluster.within.latency_s + nbytes / cluster.within.bytes_per_s
        assert cluster.between is not None
        share = cluster.between.bytes_per_s * shape.per_node / cluster.ranks_per_node
        return cluster.launch_s + cluster.between.latency_s + nbytes / share

    def _tensor(self, products_s: float, which: Pass, *, dense: bool) -> float:
        """Exposed gathers and scatters of one pass through a layer."""
        both = self._over_tensor(around_products(self._model, self._share, which, dense=dense))
        if not self._within.overlaps or not both:
            return both
        return both / CHUNKS + hidden(self._cluster, products_s, both * (1 - 1 / CHUNKS))

    def _over_tensor(self, issued: Sequence[Issued]) -> float:
        """Seconds of these one after the other, over tensor-parallel ranks."""
        shape = self._within.tensor_shape
        return sum(
            one.count * collective_cost(self._cluster, one.op, round(one.nbytes), shape).seconds for one in issued
        )

    def _experts(self, compute_s: float) -> float:
        """Exposed seconds of tokens on the way to their experts, and back; ``compute_s`` may overlap them."""
        share, model, within = self._share, self._model, self._within
        if share.ep == 1 or model.experts is None:
            return 0.0
        copies: float = model.experts.active
        if within.dispatch.startswith("once"):
            # Of experts chosen at random, so many different nodes have one, or ranks of a single node.
            parts: float = within.expert_shape.nodes if within.expert_shape.nodes > 1 else share.ep
            parts = max(1.0, parts * model.experts.active_groups / model.experts.groups)
            copies = parts * (1 - (1 - 1 / parts) ** copies)
        sent = share.tokens / share.tp * copies * model.dim * share.element
        both = 2 * collective_cost(self._cluster, "all_to_all", round(sent), within.expert_shape).seconds
        if within.dispatch.endswith("overlapped"):
            both = hidden(self._cluster, compute_s, both)
        # Ranks that split an expert gather what each of them got, and add up what comes out.
        rows = round(expert_rows(model, share) * model.dim * share.element)
        ops: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter")
        return both + sum(collective_cost(self._cluster, op, rows, within.split_shape).seconds for op in ops)

    def _product(self, product: Product, *, plain: bool = False, grouped: bool = False) -> float:
        low = self._share.precision in LOW_BYTES and not plain
        operand = LOW_BYTES[self._share.precision] if low else self._share.element
        # Elements of a sum. Forward and the gradients of inputs and weights each sum over another side.
        dtype = self._share.precision if low else self._share.dtype
        units = self._hardware.multiprocessors
        each = self._hardware.matmul[dtype].flops_per_s / units if grouped and units else 0.0
        fill = GROUPED_TILE_S * each / (2 * TILE**2)
        flops = product.flops * (1 + fill * (1 / product.k + 1 / product.n + 1 / product.m) / 3)
        return product_seconds(self._hardware, dtype, flops, product.nbytes(operand, self._share.element))

    def _moves(self, moves: Sequence[Move]) -> float:
        part = 1.0 if self._share.fused else EAGER_PART
        return sum(
            move_seconds(self._hardware, move.nbytes / part, move.transcendentals)
            + first_touch_seconds(self._hardware, move.fresh)
            for move in moves
        )

    def _at_least_launched(self, device_s: float, kernels: float, *, dense: bool) -> float:
        """The host may take longer to launch the kernels of a layer than the device to run them."""
        hardware, graphs = self._hardware, self._within.graphs
        if graphs == "steps":
            return device_s
        if not dense:
            experts = self._model.experts.count / self._share.ep if self._model.experts else 0.0
            kernels = kernels * (graphs != "blocks") + ROUTER_KERNELS * (graphs == "none")
            kernels += EXPERT_KERNELS + EACH_EXPERT * experts * (self._share.precision in LOW_BYTES)
            kernels += OVERLAP_KERNELS * self._within.dispatch.endswith("overlapped")
        return max(device_s, kernels * hardware.host_s) if hardware.asynchronous else device_s


def seen_part(model: ModelSpec, length: int) -> float:
    """The part of the causal half's scores that layers compute, which see a window or everything, on average."""
    if not model.window or model.window >= length:
        return 1.0
    windowed = 1 - max(0.0, 1 - (model.window + TILE) / length) ** 2
    whole = 1 / model.global_every if model.global_every else 0.0
    return whole + (1 - whole) * windowed
