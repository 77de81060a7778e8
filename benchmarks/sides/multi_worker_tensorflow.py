"""The training step with TensorFlow's MultiWorkerMirroredStrategy: a process a worker, CPU."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportArgumentType=false
# (the peer is installed in its own environment, not in the one that is checked)
from __future__ import annotations

import os

import mlp_problem
import mlp_tensorflow
import multi_worker_crew
import tensorflow as tf


def main() -> None:
    parser = mlp_tensorflow.parser()
    parser.add_argument(
        "--threads", type=int, default=0, help="for an operation; 0: TensorFlow's default"
    )
    options, crew = multi_worker_crew.join(parser)
    os.environ["TF_CONFIG"] = crew.tf_config
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    problem = mlp_problem.make(options.batch_size)
    train_step = mlp_tensorflow.make_step(strategy, problem, options)
    images = mlp_tensorflow.place(strategy, problem.images)
    labels = mlp_tensorflow.place(strategy, problem.labels)
    run = mlp_tensorflow.make_run(train_step, images, labels)
    crew.serve(run)


if __name__ == "__main__":
    main()
