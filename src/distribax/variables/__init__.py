"""Variables: state that lives on devices, one class with a placement."""

from distribax.variables.placement import Central as Central
from distribax.variables.placement import Placement as Placement
from distribax.variables.placement import Replicated as Replicated
from distribax.variables.placement import Single as Single
from distribax.variables.placement import Stacked as Stacked
from distribax.variables.sharded.embedding import embedding_lookup as embedding_lookup
from distribax.variables.sharded.sharded_variable import ShardedVariable as ShardedVariable
from distribax.variables.variable import Variable as Variable
from distribax.variables.variable import VariableDescription as VariableDescription
from distribax.variables.variable_copy import VariableCopy as VariableCopy
