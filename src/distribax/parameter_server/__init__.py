"""Parameters on servers: how they are kept, moved and updated. Ray is not needed here.

A `ParameterServer` keeps parameters and runs optimizer updates on them; a `ParameterClient` in each
worker pulls values and pushes operations. What starts and watches the processes is elsewhere.
"""

from __future__ import annotations

from distribax.errors import ParameterServerError as ParameterServerError
from distribax.errors import ParameterServerUnreachableError as ParameterServerUnreachableError
from distribax.errors import ParametersLostError as ParametersLostError
from distribax.parameter_server.client.parameter_client import ParameterClient as ParameterClient
from distribax.parameter_server.parameter_server import ParameterServer as ParameterServer
from distribax.parameter_server.protocol.operations import Apply as Apply
from distribax.parameter_server.protocol.operations import Array as Array
from distribax.parameter_server.protocol.operations import Assign as Assign
from distribax.parameter_server.protocol.operations import AssignAdd as AssignAdd
from distribax.parameter_server.protocol.operations import Op as Op
from distribax.parameter_server.protocol.operations import Scatter as Scatter
from distribax.parameter_server.protocol.operations import SparseGradient as SparseGradient
from distribax.parameter_server.protocol.parameter_spec import Endpoint as Endpoint
from distribax.parameter_server.protocol.parameter_spec import OptimizerSpec as OptimizerSpec
from distribax.parameter_server.protocol.parameter_spec import ParameterSpec as ParameterSpec
