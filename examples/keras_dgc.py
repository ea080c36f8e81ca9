"""Train a small Keras 3 network on MNIST under Horovod with ``fit`` and Deep Gradient Compression."""

from __future__ import annotations

import common
import data
import horovod.tensorflow as hvd
import keras
from keras_mnist import start, train

import hvd_gradcomp.keras as gradcomp


def main() -> None:
    args = common.parser(__file__, __doc__, codec=False, dgc=True).parse_args()
    start(args.seed)
    digits, test = data.load()
    digits = data.shard(digits, hvd.rank(), hvd.size())
    # The SGD as it would be without compression, and around it all that DGC takes.
    optimizer = gradcomp.DGCOptimizer(keras.optimizers.SGD(args.lr, momentum=0.9),
                                      **common.dgc_settings(args, data.steps_per_epoch(digits, args.batch_size)))
    train(args, optimizer, digits, test)


if __name__ == "__main__":
    main()
