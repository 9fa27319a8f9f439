"""The networks in Keras 3 on TensorFlow, as one would write them there: one layer after the other, lane by lane.

Names and orders of weights are those of mlcn_jax's parameters.
"""

import keras
import numpy as np
import tensorflow as tf

from benchmarks import networks
from benchmarks.networks import Network

PACKAGES = ("tensorflow", "keras", "numpy")


def squash(s):
    squared = tf.reduce_sum(tf.square(s), axis=-1, keepdims=True)
    return s * tf.sqrt(squared + 1e-20) / (1.0 + squared)


def lengths(v):
    return tf.sqrt(tf.reduce_sum(tf.square(v), axis=-1) + 1e-20)


def gelu(x):
    return tf.nn.gelu(x, approximate=True)


def conv(filters, **kwargs):
    return keras.layers.Conv2D(filters, 9, **kwargs)


class Lane(keras.layers.Layer):
    def __init__(self, kind, width):
        super().__init__()
        self.before = keras.layers.SeparableConv2D(4 * width, 1) if kind == "mlcn2" else None
        self.conv1 = conv((8 if kind == "mlcn2" else 16) * width, activation="relu")
        self.primary = conv(16 * width, strides=2)
        self.dense = keras.layers.Dense(networks.NUM_CLASSES, use_bias=False)

    def call(self, x):
        if self.before is not None:
            x = self.before(x)
        x = self.primary(self.conv1(x))
        u = squash(tf.reshape(x, (x.shape[0], -1, 8)))
        return squash(self.dense(tf.reshape(u, (x.shape[0], -1))))


class MLCN(keras.Model):
    def __init__(self, network: Network):
        super().__init__()
        self.lanes = [Lane(network.kind, network.width) for _ in range(network.lanes)]

    def call(self, x):
        return tf.stack([lane(x) for lane in self.lanes], axis=-1)

    def load(self, weights):
        for i, lane in enumerate(self.lanes):
            lane_weights = {name.split("/", 2)[2]: w[i] for name, w in weights.items() if name.startswith("encoder/")}
            if lane.before is not None:
                depthwise, pointwise = lane_weights["conv1/depthwise"], lane_weights["conv1/pointwise"]
                bias = lane_weights["conv1/pointwise_bias"]
                lane.before.set_weights([depthwise.reshape(1, 1, -1, 1), pointwise[None, None], bias])
            lane.conv1.set_weights([lane_weights["conv1/kernel"], lane_weights["conv1/bias"]])
            lane.primary.set_weights([lane_weights["primary/kernel"], lane_weights["primary/bias"]])
            lane.dense.set_weights([lane_weights["capsule_weights"].reshape(-1, networks.NUM_CLASSES)])


class ResNetLane(keras.layers.Layer):
    """A lane of the kind `resnet`: its log-probabilities. Normalisation may be folded into its weights."""

    def __init__(self, network: Network, folded: bool):
        super().__init__()
        self.folded, self.depth, width = folded, network.depth, network.width
        self.stem = keras.layers.Conv2D(8 * network.image_shape[-1], 2, activation=gelu)
        self.convs, self.norms = [], []
        for filters in (16 * width, 48 * width, 64 * width):
            for _ in range(self.depth):
                self.convs.append(keras.layers.Conv2D(filters, 3, padding="same", use_bias=folded))
                norm = keras.layers.BatchNormalization(scale=False, epsilon=1e-5)
                self.norms.append(keras.layers.Identity() if folded else norm)
        self.head = keras.layers.Dense(networks.NUM_CLASSES, use_bias=False)

    def layer(self, x, index, pooled):
        x = self.convs[index](x)
        if pooled:
            x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        return x if self.folded else self.norms[index](x, training=True)

    def call(self, x):
        x = self.stem(x)
        for stage in range(3):
            first = stage * self.depth
            x = shortcut = gelu(self.layer(x, first, True))
            for i in range(1, self.depth):
                x = self.layer(x, first + i, False)
                if i == self.depth - 1 > 1:
                    x = x + shortcut
                x = gelu(x)
        return tf.nn.log_softmax(self.head(tf.reduce_max(x, axis=(1, 2))) / 9)

    def load(self, weights):
        self.stem.set_weights([weights["trunk/whitening/kernel"], weights["trunk/whitening/bias"]])
        layers = [f"{stage}_{i}" for stage in (1, 2, 3) for i in range(1, self.depth + 1)]
        for layer, conv, norm in zip(layers, self.convs, self.norms, strict=True):
            bias = weights[f"trunk/norm{layer}/bias"]
            conv.set_weights([weights[f"trunk/conv{layer}"], *([bias] if self.folded else [])])
            if not self.folded:
                norm.set_weights([bias, np.zeros_like(bias), np.ones_like(bias)])
        self.head.set_weights([weights["head/kernel"]])


class ResNets(keras.Model):
    def __init__(self, network: Network, folded: bool):
        super().__init__()
        self.lanes = [ResNetLane(network, folded) for _ in range(network.lanes)]

    def call(self, x):
        return tf.stack([lane(x) for lane in self.lanes], axis=-1)

    def load(self, weights):
        for i, lane in enumerate(self.lanes):
            lane.load({name.split("/", 2)[2]: w[i] for name, w in weights.items() if name.startswith("encoder/")})

    @property
    def trained(self):
        """What the optimizer changes: the whitening's kernel stays."""
        frozen = {id(lane.stem.kernel) for lane in self.lanes}
        return [variable for variable in self.trainable_variables if id(variable) not in frozen]


class CapsNet(keras.Model):
    def __init__(self, network: Network):
        super().__init__()
        self.conv1 = conv(256, activation="relu")
        self.primary = conv(256, strides=2)
        height, width, _ = network.image_shape
        num_primary = 32 * ((height - 16) // 2 + (height % 2)) * ((width - 16) // 2 + (width % 2))
        self.routing = self.add_weight(shape=(num_primary, networks.NUM_CLASSES, 8, 16), name="capsule_weights")

    def call(self, x):
        x = self.primary(self.conv1(x))
        u = squash(tf.reshape(x, (x.shape[0], -1, 8)))
        u_hat = tf.einsum("bid,ijdm->bijm", u, self.routing)
        b = tf.zeros(u_hat.shape[:3])
        for i in range(3):
            v = squash(tf.einsum("bij,bijm->bjm", tf.nn.softmax(b, axis=-1), u_hat))
            if i < 2:
                b += tf.einsum("bijm,bjm->bij", u_hat, v)
        return v

    def load(self, weights):
        for name, layer in (("conv1", self.conv1), ("primary", self.primary)):
            layer.set_weights([weights[f"encoder/{name}/kernel"], weights[f"encoder/{name}/bias"]])
        self.routing.assign(weights["encoder/capsule_weights"])


class Program:
    """Training and inference of one network, started from given weights."""

    def __init__(self, network: Network, batch: int, weights: dict[str, np.ndarray], variant: str, dtype: str):
        if dtype != "float32":
            raise ValueError(f"the Keras peer computes in float32 only, not in {dtype}")
        self.image_shape = (batch, *network.image_shape)
        self.classifies = network.kind == "resnet"
        if self.classifies:
            self.encoder = ResNets(network, any(name.endswith("/folded") for name in weights))
        else:
            self.encoder = CapsNet(network) if network.kind == "capsnet" else MLCN(network)
        pixels = int(np.prod(network.image_shape))
        dense = keras.layers.Dense
        self.decoder = keras.Sequential(
            [dense(512, activation="relu"), dense(1024, activation="relu"), dense(pixels, activation="sigmoid")]
        )
        capsules = self.encoder(tf.zeros(self.image_shape))
        self.decoder(tf.zeros((batch, int(np.prod(capsules.shape[1:])))))
        self.encoder.load(weights)
        for name, layer in zip(("hidden1", "hidden2", "pixels"), self.decoder.layers, strict=True):
            layer.set_weights([weights[f"decoder/{name}/kernel"], weights[f"decoder/{name}/bias"]])
        trained = self.encoder.trained if self.classifies else self.encoder.trainable_variables
        self.variables = trained + self.decoder.trainable_variables
        self.optimizer = keras.optimizers.Adam(networks.LEARNING_RATE, epsilon=networks.EPSILON)
        self.optimizer.build(self.variables)
        xla = variant == "graph_xla"  # in place of tf.function as it is
        images = tf.TensorSpec(self.image_shape, tf.uint8)
        self._train = tf.function(self._train_step, [images, tf.TensorSpec((batch,), tf.int32)], jit_compile=xla)
        self._infer = tf.function(self._lengths, [images], jit_compile=xla)

    def _lengths(self, images):
        found = self.encoder(tf.cast(images, tf.float32) / 255.0)
        return tf.sqrt(tf.reduce_sum(tf.exp(found), axis=-1)) if self.classifies else lengths(found)

    def _loss(self, images, labels):
        x = tf.cast(images, tf.float32) / 255.0
        v = self.encoder(x)
        truth = tf.one_hot(labels, networks.NUM_CLASSES)
        if self.classifies:
            own = -tf.reduce_sum(v * truth[..., None], axis=(1, 2))
            v = tf.stop_gradient(tf.exp(v / 2))
        else:
            size = lengths(v)
            margin = truth * tf.square(tf.nn.relu(0.9 - size)) + 0.5 * (1 - truth) * tf.square(tf.nn.relu(size - 0.1))
            own = tf.reduce_sum(margin, axis=-1)
        masked = tf.reshape(v * truth[..., None], (v.shape[0], -1))
        reconstruction = tf.reshape(self.decoder(masked), x.shape)
        error = tf.reduce_mean(tf.square(reconstruction - x))
        return tf.reduce_mean(own) + networks.RECONSTRUCTION_WEIGHT * error

    def _train_step(self, images, labels):
        with tf.GradientTape() as tape:
            loss = self._loss(images, labels)
        self.optimizer.apply(tape.gradient(loss, self.variables), self.variables)
        return loss

    def train(self, images: np.ndarray, labels: np.ndarray):
        """Takes a training step; returns its loss, which `float` waits for."""
        return self._train(tf.constant(images), tf.constant(labels))

    def infer(self, images: np.ndarray) -> np.ndarray:
        """Class probabilities [batch, classes]."""
        return self._infer(tf.constant(images)).numpy()
