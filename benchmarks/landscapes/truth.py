"""What a launch really does on a simulated card: its bytes, its death, or its speed.

Nothing here comes from the product. The step time has other terms than its forecast has: efficiency falls
with small batches of tokens and with large chunks, graphs are padded to the next captured size, attention
runs at another speed for each block size, the host pays for every block of every table, and preempted
sequences are computed again. The rates are drawn per seed, 10 to 30 % around other means than the product's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Card:
    """A card as its owner knows it."""

    name: str
    total_mib: float
    free_mib: float
    memory_gb_s: float
    tflops: float
    pcie_gb_s: float


@dataclass(frozen=True)
class Net:
    """A model as its config says, in the sizes that matter here.

    Attributes:
        folder: under tests/data/models; what the product reads.
        weights_mib: of everything, `decoder_mib` of the layers.
        active: share of the decoder that a batch of one token reads (experts).
    """

    folder: str
    layers: int
    hidden: int
    inner: int
    kv_heads: int
    head_dim: int
    vocab: int
    weights_mib: float
    decoder_mib: float
    params_b: float
    encoder_mib: float = 0.0
    experts: int = 1
    chosen: int = 1

    @property
    def token_bytes(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Options:
    """One launch with vLLM's defaults filled in."""

    gmu: float
    offload_gb: float
    length: int
    seqs: int
    tokens: int
    block: int


@dataclass(frozen=True)
class Trap:
    """What the forecast cannot know on a misleading landscape.

    Attributes:
        slow_block: attention with blocks under this is `slow_factor` times slower.
        slow_chunk: chunks above this many tokens are `chunk_factor` times slower.
        memory, compute, host: rates against the usual ones.
    """

    slow_block: int = 0
    slow_factor: float = 1.0
    slow_chunk: int = 1 << 30
    chunk_factor: float = 1.0
    memory: float = 1.0
    compute: float = 1.0
    host: float = 1.0


@dataclass(frozen=True)
class Draw:
    """The rates and bytes of one seed."""

    memory: float
    compute: float
    link: float
    step_s: float
    seq_s: float
    block_s: float
    launch_s: float
    small: float
    large: float
    again: float
    block_speed: dict[int, float]
    weights: float
    activation: float
    other_mib: float
    graph: float
    later_mib: float


def draw(seed: int) -> Draw:
    """10 to 30 % around the middle, each on its own."""
    r = np.random.default_rng([7, seed])

    def off(middle: float) -> float:
        return float(middle * (1 + r.choice([-1, 1]) * r.uniform(0.10, 0.30)))

    return Draw(
        memory=min(0.95, off(0.74)),
        compute=off(0.50),
        link=off(0.75),
        step_s=off(2.6e-3),
        seq_s=off(18e-6),
        block_s=off(0.20e-6),
        launch_s=off(60e-6),
        small=off(160.0),
        large=off(0.10),
        again=off(0.5),
        # Kernels with small blocks read a little slower; which is the best differs between cards.
        block_speed={
            16: 1 + float(r.uniform(0.0, 0.12)),
            32: 1 + float(r.uniform(-0.02, 0.06)),
            64: 1.0,
            128: 1 + float(r.uniform(-0.02, 0.10)),
        },
        weights=float(r.uniform(1.0, 1.006)),
        activation=float(r.uniform(0.98, 1.10)),
        other_mib=float(r.uniform(170, 560)),
        graph=float(r.uniform(0.7, 1.4)),
        later_mib=float(r.uniform(20, 160)),
    )


@dataclass(frozen=True)
class Launched:
    """One launch: `died` names what ended it, else it makes `tok_s`."""

    died: str
    tok_s: float
    pool_bytes: float
    blocks: int
    weights_bytes: float
    moved_bytes: float
    non_kv_bytes: float


class Truth:
    """The truth of one landscape under one seed."""

    def __init__(
        self, card: Card, net: Net, load: tuple[int, tuple[tuple[int, int], ...]], trap: Trap, seed: int
    ):
        self.card, self.net, self.trap = card, net, trap
        self.clients, self.shapes = load
        self.d = draw(seed)

    def launch(self, o: Options) -> Launched:
        card, net, d = self.card, self.net, self.d
        if o.tokens < o.seqs:
            return Launched("bad_arg", 0.0, 0.0, 0, 0.0, 0.0, 0.0)
        budget = math.ceil(card.total_mib * MIB * o.gmu)
        layer = net.decoder_mib / net.layers * MIB
        # Whole tensors until the budget is reached: about a seventh of a layer at a time.
        asked = o.offload_gb * GIB
        moved = min(net.decoder_mib * MIB, math.ceil(asked / (layer / 7)) * layer / 7) if asked else 0.0
        weights = net.weights_mib * MIB * d.weights - moved
        graphs = self._graphs(o)
        peak = max(o.tokens * 6 * (net.inner + net.hidden), o.seqs * net.vocab * 2) + net.encoder_mib * MIB
        sampler = o.seqs * net.vocab * 4.2
        graph_bytes = (90 + 7.5 * len(graphs)) * MIB * d.graph if graphs else 0.0
        non_kv = weights + peak * d.activation + sampler + d.other_mib * MIB + graph_bytes
        pool = budget - non_kv
        block_bytes = net.token_bytes * o.block
        blocks = max(0, int(pool // block_bytes))
        died = ""
        if budget > card.free_mib * MIB:
            died = "gate1_budget"
        elif pool <= 0:
            died = "gate2_no_kv"
        elif (blocks - 1) * o.block < o.length:
            died = "gate3_seq_too_long"
        elif card.free_mib * MIB - budget < d.later_mib * MIB + 0.02 * graph_bytes:
            died = "oom_runtime"
        rate = 0.0 if died else self._tok_s(o, blocks, moved, graphs)
        return Launched(died, rate, pool, blocks, weights, moved, non_kv)

    def _graphs(self, o: Options) -> list[int]:
        top = min(2 * o.seqs, 512, o.tokens)
        sizes = [n for n in (1, 2, 4) if n <= top] + list(range(8, min(256, top + 1), 8))
        return sizes + list(range(256, top + 1, 16))

    def _tok_s(self, o: Options, blocks: int, moved: float, graphs: list[int]) -> float:
        card, net, d, trap = self.card, self.net, self.d, self.trap
        given = sum(i for i, _ in self.shapes) / len(self.shapes)
        made = sum(m for _, m in self.shapes) / len(self.shapes)
        held = (blocks - 1) * o.block
        full = given + made + o.block / 2
        wanted = min(self.clients, o.seqs)
        fits = held / (given + 0.55 * made + o.block / 2)
        n = max(1.0, min(wanted, fits))
        # Sequences that do not fit to their end are thrown out and computed again.
        crowd = max(0.0, min(wanted, fits) * full / max(held, full) - 1)
        prompt = given + d.again * crowd * (given + made)
        context = given + made / 2
        batch = max(1.0, n)

        def step(tokens: float, decoding: float, chunk: float) -> float:
            share = 1 - (1 - net.chosen / net.experts) ** tokens if net.experts > 1 else 1.0
            stay = net.decoder_mib * MIB - moved
            head = 2.0 * net.vocab * net.hidden
            slow = trap.slow_factor if o.block < trap.slow_block else 1.0
            kv = decoding * context * net.token_bytes * d.block_speed.get(o.block, 1.0) * slow
            reach = d.memory * trap.memory * card.memory_gb_s * 1e9
            read = (stay * share + head + kv) / reach
            active = net.params_b * 1e9 * (net.chosen / net.experts)
            rate = d.compute * trap.compute * card.tflops * 1e12 * tokens / (tokens + d.small)
            if chunk > 2048:
                rate /= 1 + d.large * math.log2(chunk / 2048)
            if chunk > trap.slow_chunk:
                rate /= trap.chunk_factor
            compute = (2 * active * tokens + 4 * net.layers * net.hidden * chunk * given / 2) / rate
            device = (read**4 + compute**4) ** 0.25 + moved / (d.link * card.pcie_gb_s * 1e9)
            host = d.step_s + d.seq_s * decoding + d.block_s * decoding * context / o.block
            if chunk or not graphs or tokens > graphs[-1]:
                host += net.layers * d.launch_s * (0.35 if chunk else 1.0)
            return device + host * trap.host

        padded = next((size for size in graphs if size >= batch), batch)
        pure = step(padded, batch, 0.0)
        chunks = max(1.0, math.ceil(prompt / max(1.0, o.tokens - batch)))
        chunk = prompt / chunks
        mixed = step(batch + chunk, batch, chunk)
        steps = made / batch
        # Several short prompts share a step when the budget allows.
        packed = max(1.0, min(batch, (o.tokens - batch) / max(1.0, prompt))) if chunks == 1 else 1.0
        if packed > 1:
            together = min(packed, max(1.0, 1 / max(steps, 1e-9)))
            mixed = step(batch + chunk * together, batch, chunk * together) / together
        seconds = chunks * mixed + max(0.0, steps - chunks) * pure
        return made / seconds
