"""TensorFlow's Estimator over today's strategies: a model function, and what trains it."""

from distribax.estimator.estimator import Estimator as Estimator
from distribax.estimator.evaluation import EvalSpec as EvalSpec
from distribax.estimator.evaluation import TrainSpec as TrainSpec
from distribax.estimator.evaluation import train_and_evaluate as train_and_evaluate
from distribax.estimator.model_spec import EstimatorSpec as EstimatorSpec
from distribax.estimator.model_spec import ModeKeys as ModeKeys
from distribax.estimator.model_state import get_global_step as get_global_step
from distribax.estimator.model_state import get_or_create as get_or_create
from distribax.estimator.model_state import trainable_variables as trainable_variables
from distribax.estimator.run_config import RunConfig as RunConfig
