"""Values that differ, or are copied, over replicas, and how they are wrapped and unwrapped."""

from distribax.values.arithmetic import ArrayLike as ArrayLike
from distribax.values.distributed import DistributedValues as DistributedValues
from distribax.values.distributed import GlobalForm as GlobalForm
from distribax.values.distributed import Mirrored as Mirrored
from distribax.values.distributed import PerReplica as PerReplica
from distribax.values.distributed import settle as settle
from distribax.values.indexed_slices import IndexedSlices as IndexedSlices
from distribax.values.layout import Global as Global
from distribax.values.layout import Layout as Layout
from distribax.values.layout import Local as Local
from distribax.values.layout import Pieces as Pieces
from distribax.values.layout import copy_to_mesh as copy_to_mesh
from distribax.values.layout import get_local_pieces as get_local_pieces
from distribax.values.leaves import is_none_or_opaque as is_none_or_opaque
from distribax.values.leaves import is_none_wrapped_or_opaque as is_none_wrapped_or_opaque
from distribax.values.leaves import is_number as is_number
from distribax.values.leaves import is_opaque as is_opaque
from distribax.values.leaves import is_wrapped as is_wrapped
from distribax.values.leaves import is_wrapped_or_opaque as is_wrapped_or_opaque
from distribax.values.leaves import make_opaque as make_opaque
from distribax.values.regroup import Origins as Origins
from distribax.values.regroup import regroup as regroup
from distribax.values.regroup import select as select
from distribax.values.tensor_shape import TensorShape as TensorShape
from distribax.values.waiting import group as group
