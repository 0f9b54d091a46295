"""Well-known models as layers with shapes and work, and what a step of one is without any exchange.

Work is counted in floating-point operations of one sample's forward (a multiplication and an addition are two); backward takes twice as
many. Layers that don't multiply, such as normalisations, count with the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from ddpcomm.errors import ConfigurationError
from ddpcomm.layout import ParameterSize
from ddpcomm.simulate import StepProfile

Shape = tuple[int, ...]
BACKWARD_SHARE = 2 / 3  # of a step's operations: the gradients of inputs and of weights each take as many as forward


@dataclass(frozen=True)
class Layer:
    """Parameters that become ready together, in the order of registration.

    Args:
        name: of the layer.
        shapes: of its parameters.
        flops: of one sample's forward.
    """

    name: str
    shapes: tuple[Shape, ...]
    flops: float

    @property
    def numel(self) -> int:
        return sum(prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Workload:
    """A model, in the order of its forward. batch: samples a GPU, unless another number is asked for."""

    name: str
    layers: tuple[Layer, ...]
    batch: int

    @property
    def shapes(self) -> list[Shape]:
        """Of all parameters, in the order of registration."""
        return [shape for layer in self.layers for shape in layer.shapes]

    @property
    def flops(self) -> float:
        """Of one sample's forward."""
        return sum(layer.flops for layer in self.layers)

    def step_seconds(self, batch: int, flops_per_second: float) -> float:
        """Of forward and backward at this speed."""
        return 3 * self.flops * batch / flops_per_second

    def profile(self, step_seconds: float, element_bytes: int = 4) -> StepProfile:
        """The step of one GPU, its time spread over the layers in proportion to their work, backward from last to first.

        Raises:
            ConfigurationError: a time that is not above 0.
        """
        if not step_seconds > 0:
            raise ConfigurationError(f"a step must take more than 0 s, got {step_seconds}")
        backward, total = step_seconds * BACKWARD_SHARE, self.flops
        sizes: list[ParameterSize] = []
        ready: list[float] = []
        before = 0.0
        for layer in self.layers:  # a layer is ready when all after it and itself are done: all but those before it
            sizes += [ParameterSize(prod(shape), element_bytes, "gradients") for shape in layer.shapes]
            ready += [backward * (total - before) / total if total > 0 else backward] * len(layer.shapes)
            before += layer.flops
        return StepProfile(tuple(sizes), tuple(min(seconds, backward) for seconds in ready), backward, step_seconds - backward)


def resnet(name: str, blocks: Sequence[int], groups: int, width_per_group: int, batch: int) -> Workload:
    """torchvision's ResNets and ResNeXts with bottlenecks, for images of 224 x 224."""

    def convolution(label: str, into: int, out: int, kernel: int, size: int, groups: int = 1) -> Layer:
        weight = (out, into // groups, kernel, kernel)
        return Layer(label, (weight, (out,), (out,)), 2.0 * prod(weight) * size * size)

    layers = [convolution("conv1", 3, 64, 7, 112)]
    channels, size = 64, 56
    for stage, count in enumerate(blocks):
        planes = 64 << stage
        width, out = planes * width_per_group // 64 * groups, 4 * planes
        for block in range(count):
            label, before = f"layer{stage + 1}.{block}", size
            if stage > 0 and block == 0:
                size //= 2  # in the 3 x 3 convolution
            layers.append(convolution(f"{label}.conv1", channels, width, 1, before))
            layers.append(convolution(f"{label}.conv2", width, width, 3, size, groups))
            layers.append(convolution(f"{label}.conv3", width, out, 1, size))
            if block == 0:
                layers.append(convolution(f"{label}.downsample", channels, out, 1, size))
            channels = out
    layers.append(Layer("fc", ((1000, channels), (1000,)), 2.0 * 1000 * channels))
    return Workload(name, tuple(layers), batch)


def bert_large(sequence: int = 128, batch: int = 32) -> Workload:
    """BERT-large's encoder with its pooler, for sequences of `sequence` tokens."""
    hidden, inner = 1024, 4096
    square: tuple[Shape, ...] = ((hidden, hidden), (hidden,))
    layers = [Layer("embeddings", ((30522, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)), 0.0)]
    for block in range(24):
        attention = (*square, *square, *square, *square, (hidden,), (hidden,))
        work = 2.0 * sequence * (4 * hidden * hidden + 2 * sequence * hidden)
        layers.append(Layer(f"block{block}.attention", attention, work))
        feed_forward = ((inner, hidden), (inner,), (hidden, inner), (hidden,), (hidden,), (hidden,))
        layers.append(Layer(f"block{block}.feed_forward", feed_forward, 2.0 * sequence * 2 * hidden * inner))
    return Workload("bert_large", (*layers, Layer("pooler", square, 2.0 * hidden * hidden)), batch)


def gpt2_xl(sequence: int = 1024, batch: int = 4) -> Workload:
    """GPT-2 XL, whose output layer shares the embedding's weight: that is ready only when backward ends."""
    hidden, vocabulary = 1600, 50257
    layers = [Layer("embeddings", ((vocabulary, hidden), (1024, hidden)), 0.0)]
    for block in range(48):
        attention: tuple[Shape, ...] = ((hidden,), (hidden,), (hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), (hidden,))
        work = 2.0 * sequence * (4 * hidden * hidden + 2 * sequence * hidden)
        layers.append(Layer(f"block{block}.attention", attention, work))
        feed_forward: tuple[Shape, ...] = ((hidden,), (hidden,), (hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,))
        layers.append(Layer(f"block{block}.feed_forward", feed_forward, 2.0 * sequence * 8 * hidden * hidden))
    return Workload("gpt2_xl", (*layers, Layer("output", ((hidden,), (hidden,)), 2.0 * sequence * vocabulary * hidden)), batch)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "resnet50": lambda: resnet("resnet50", (3, 4, 6, 3), 1, 64, 32),
    "resnet101": lambda: resnet("resnet101", (3, 4, 23, 3), 1, 64, 32),
    "resnext50_32x4d": lambda: resnet("resnext50_32x4d", (3, 4, 6, 3), 32, 4, 32),
    "resnext101_32x8d": lambda: resnet("resnext101_32x8d", (3, 4, 23, 3), 32, 8, 32),
    "bert_large": bert_large,
    "gpt2_xl": gpt2_xl,
}
