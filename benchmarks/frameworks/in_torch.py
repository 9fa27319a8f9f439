"""The networks in PyTorch, as one would write them there: one module after the other, lane by lane.

The `grouped` variants compute all lanes at once: their first convolutions as one with more filters, the second
ones as one grouped convolution, the last products as one batched product. The `nchw` ones hold images and kernels as
PyTorch does by default, the others channels-last. The `frozen` ones have their weights compiled in. Weights are named
as in mlcn_jax.
"""

import numpy as np
import torch
import torch._inductor.config as inductor
from torch import nn
from torch.nn import functional

from benchmarks import networks
from benchmarks.networks import Network

PACKAGES = ("torch", "numpy")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def squash(s):
    squared = s.square().sum(-1, keepdim=True)
    return s * (squared + 1e-20).sqrt() / (1 + squared)


def lengths(v):
    return (v.square().sum(-1) + 1e-20).sqrt()


def parameter(array):
    return nn.Parameter(torch.from_numpy(np.ascontiguousarray(array)))


def conv_weight(kernel):
    """[k, k, in, out] -> [out, in, k, k]."""
    return parameter(kernel.transpose(3, 2, 0, 1))


class Lane(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.separable = "conv1/depthwise" in weights
        if self.separable:
            self.depthwise = parameter(weights["conv1/depthwise"][:, None, None, None])
            self.pointwise = conv_weight(weights["conv1/pointwise"][None, None])
            self.pointwise_bias = parameter(weights["conv1/pointwise_bias"])
        self.conv1, self.bias1 = conv_weight(weights["conv1/kernel"]), parameter(weights["conv1/bias"])
        self.conv2, self.bias2 = conv_weight(weights["primary/kernel"]), parameter(weights["primary/bias"])
        self.dense = parameter(weights["capsule_weights"].reshape(-1, networks.NUM_CLASSES))

    def forward(self, x):
        if self.separable:
            x = functional.conv2d(x, self.depthwise, groups=x.shape[1])
            x = functional.conv2d(x, self.pointwise, self.pointwise_bias)
        x = functional.relu(functional.conv2d(x, self.conv1, self.bias1))
        x = functional.conv2d(x, self.conv2, self.bias2, stride=2)
        u = squash(x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 8))
        return squash(u.flatten(1) @ self.dense)


class MLCN(nn.Module):
    def __init__(self, network: Network, weights):
        super().__init__()
        self.lanes = nn.ModuleList(Lane({name: w[i] for name, w in weights.items()}) for i in range(network.lanes))

    def forward(self, x):
        return torch.stack([lane(x) for lane in self.lanes], dim=-1)


class GroupedMLCN(nn.Module):
    def __init__(self, network: Network, weights):
        super().__init__()
        self.groups = network.lanes
        self.separable = "conv1/depthwise" in weights

        def joined(kernels):  # [lanes, k, k, in, out] -> [lanes * out, in, k, k]
            return parameter(np.concatenate([kernel.transpose(3, 2, 0, 1) for kernel in kernels]))

        if self.separable:
            self.depthwise = parameter(weights["conv1/depthwise"].repeat(weights["conv1/pointwise"].shape[-1], axis=0))
            self.pointwise = joined(weights["conv1/pointwise"][:, None, None])
            self.pointwise_bias = parameter(weights["conv1/pointwise_bias"].reshape(-1))
        self.conv1, self.bias1 = joined(weights["conv1/kernel"]), parameter(weights["conv1/bias"].reshape(-1))
        self.conv2, self.bias2 = joined(weights["primary/kernel"]), parameter(weights["primary/bias"].reshape(-1))
        self.dense = parameter(weights["capsule_weights"].reshape(self.groups, -1, networks.NUM_CLASSES))

    def forward(self, x):
        if self.separable:
            x = functional.conv2d(x, self.pointwise * self.depthwise[..., None, None], self.pointwise_bias)
        groups = self.groups if self.separable else 1
        x = functional.relu(functional.conv2d(x, self.conv1, self.bias1, groups=groups))
        x = functional.conv2d(x, self.conv2, self.bias2, stride=2, groups=self.groups)
        x = x.unflatten(1, (self.groups, -1)).permute(1, 0, 3, 4, 2)
        u = squash(x.reshape(*x.shape[:2], -1, 8))
        return squash(torch.bmm(u.flatten(2), self.dense)).permute(1, 2, 0)


class ResNetLane(nn.Module):
    """Lanes of the kind `resnet`, some of them at once; returns their log-probabilities.

    Weights are [groups, ...]; where normalisation is folded into them, it is left out.
    """

    def __init__(self, weights, depth: int):
        super().__init__()
        self.folded = "folded" in weights
        self.groups, self.depth = weights["head/kernel"].shape[0], depth

        def joined(kernels):  # [groups, k, k, in, out] -> [groups * out, in, k, k]
            return parameter(np.concatenate([kernel.transpose(3, 2, 0, 1) for kernel in kernels]))

        self.stem = joined(weights["trunk/whitening/kernel"]).requires_grad_(False)
        self.stem_bias = parameter(weights["trunk/whitening/bias"].reshape(-1))
        layers = [f"{stage}_{i}" for stage in (1, 2, 3) for i in range(1, depth + 1)]
        self.kernels = nn.ParameterList(joined(weights[f"trunk/conv{layer}"]) for layer in layers)
        self.biases = nn.ParameterList(parameter(weights[f"trunk/norm{layer}/bias"].reshape(-1)) for layer in layers)
        self.head = parameter(weights["head/kernel"])

    def layer(self, x, index, pooled):
        bias = self.biases[index]
        x = functional.conv2d(x, self.kernels[index], bias if self.folded else None, padding=1, groups=self.groups)
        if pooled:
            x = functional.max_pool2d(x, 2)
        return x if self.folded else functional.batch_norm(x, None, None, None, bias, training=True)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):  # as ours, which whitens in float32
            x = functional.conv2d(x, self.stem, self.stem_bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = functional.gelu(x, approximate="tanh")
        for stage in range(3):
            first = stage * self.depth
            x = shortcut = functional.gelu(self.layer(x, first, True), approximate="tanh")
            for i in range(1, self.depth):
                x = self.layer(x, first + i, False)
                if i == self.depth - 1 > 1:
                    x = x + shortcut
                x = functional.gelu(x, approximate="tanh")
        x = x.amax((2, 3)).float().unflatten(1, (self.groups, -1)).transpose(0, 1)
        return (torch.bmm(x, self.head) / 9).log_softmax(-1).permute(1, 2, 0)  # [batch, classes, groups]


class ResNets(nn.Module):
    def __init__(self, network: Network, weights, grouped: bool):
        super().__init__()
        parts = [weights] if grouped else [{n: w[i : i + 1] for n, w in weights.items()} for i in range(network.lanes)]
        self.parts = nn.ModuleList(ResNetLane(part, network.depth) for part in parts)

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], dim=-1)


class CapsNet(nn.Module):
    def __init__(self, network: Network, weights):
        super().__init__()
        self.conv1, self.bias1 = conv_weight(weights["conv1/kernel"]), parameter(weights["conv1/bias"])
        self.conv2, self.bias2 = conv_weight(weights["primary/kernel"]), parameter(weights["primary/bias"])
        self.routing = parameter(weights["capsule_weights"])

    def forward(self, x):
        x = functional.relu(functional.conv2d(x, self.conv1, self.bias1))
        x = functional.conv2d(x, self.conv2, self.bias2, stride=2)
        u = squash(x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 8))
        u_hat = torch.einsum("bid,ijdm->bijm", u, self.routing)
        b = torch.zeros(u_hat.shape[:3], device=x.device)
        for i in range(3):
            v = squash(torch.einsum("bij,bijm->bjm", b.softmax(-1), u_hat))
            if i < 2:
                b = b + torch.einsum("bijm,bjm->bij", u_hat, v)
        return v


class Program:
    """Training and inference of one network, started from given weights."""

    def __init__(self, network: Network, batch: int, weights: dict[str, np.ndarray], variant: str, dtype: str):
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TF32 where the device has it
        torch.backends.cudnn.allow_tf32 = True
        encoder = {n.removeprefix("encoder/"): w for n, w in weights.items() if n.startswith("encoder/")}
        if network.kind == "capsnet":
            self.encoder = CapsNet(network, encoder)
        else:
            encoder = {name.split("/", 1)[1]: w for name, w in encoder.items()}
            if network.kind == "resnet":
                self.encoder = ResNets(network, encoder, "grouped" in variant)
            else:
                self.encoder = (GroupedMLCN if "grouped" in variant else MLCN)(network, encoder)
        self.classifies = network.kind == "resnet"
        self.decoder = nn.ParameterList()
        for layer in ("hidden1", "hidden2", "pixels"):
            self.decoder.append(parameter(weights[f"decoder/{layer}/kernel"]))
            self.decoder.append(parameter(weights[f"decoder/{layer}/bias"]))
        self.memory_format = torch.contiguous_format if "nchw" in variant else torch.channels_last
        for part in (self.encoder, self.decoder):
            part.to(DEVICE, memory_format=self.memory_format)
        self.parameters = [*self.encoder.parameters(), *self.decoder.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, networks.LEARNING_RATE, eps=networks.EPSILON, fused=True)
        self.dtype = getattr(torch, dtype)
        inductor.freezing = "frozen" in variant
        wrap = torch.compile if "compiled" in variant else lambda function: function
        self._loss, self._lengths = wrap(self._loss), wrap(self._lengths)

    def _capsules(self, images):
        x = (images.float() / 255).permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)
        with torch.autocast(DEVICE, self.dtype, enabled=self.dtype != torch.float32):
            return x, self.encoder(x).float()

    def _lengths(self, images):
        found = self._capsules(images)[1]
        return found.exp().sum(-1).sqrt() if self.classifies else lengths(found)

    def _loss(self, images, labels):
        x, v = self._capsules(images)
        truth = functional.one_hot(labels, networks.NUM_CLASSES).float()
        if self.classifies:
            own = -(v * truth[..., None]).sum((1, 2)).mean()
            return own + networks.RECONSTRUCTION_WEIGHT * self._error(x, (v.detach() / 2).exp(), truth)
        size = lengths(v)
        margin = truth * functional.relu(0.9 - size).square() + 0.5 * (1 - truth) * functional.relu(size - 0.1).square()
        error = self._error(x, v, truth)
        return margin.sum(-1).mean() + networks.RECONSTRUCTION_WEIGHT * error

    def _error(self, x, v, truth):
        h = (v * truth[..., None]).flatten(1)
        with torch.autocast(DEVICE, self.dtype, enabled=self.dtype != torch.float32):
            h = functional.relu(h @ self.decoder[0] + self.decoder[1])
            h = functional.relu(h @ self.decoder[2] + self.decoder[3])
            h = h @ self.decoder[4] + self.decoder[5]
        reconstruction = torch.sigmoid(h.float())
        return (reconstruction - x.permute(0, 2, 3, 1).flatten(1)).square().mean()

    def train(self, images: np.ndarray, labels: np.ndarray):
        """Takes a training step; returns its loss, which `float` waits for."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(torch.from_numpy(images).to(DEVICE), torch.from_numpy(labels).to(DEVICE).long())
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.inference_mode()
    def infer(self, images: np.ndarray) -> np.ndarray:
        """Class probabilities [batch, classes]."""
        return self._lengths(torch.from_numpy(images).to(DEVICE)).cpu().numpy()


def device_peak_bytes() -> int | None:
    """Most memory of the device so far; None where it is the host's."""
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
