"""Parameters on servers: how they are kept, moved and updated. Ray is not needed here.

A `ParameterServer` keeps parameters and runs optimizer updates on them; a `ParameterClient` in each
worker pulls values and pushes operations. What starts and watches the processes is elsewhere.
"""

from __future__ import annotations

from distribax.errors import ParameterServerError as ParameterServerError
from distribax.errors import ParameterServerUnreachableError as ParameterServerUnreachableError
from distribax.errors import ParametersLostError as ParametersLostError
from distribax.parameters.client import ParameterClient as ParameterClient
from distribax.parameters.link import RestartReport as RestartReport
from distribax.parameters.memory import aligned_empty as aligned_empty
from distribax.parameters.memory import keep_freed_memory as keep_freed_memory
from distribax.parameters.operations import AddRows as AddRows
from distribax.parameters.operations import Apply as Apply
from distribax.parameters.operations import Array as Array
from distribax.parameters.operations import Assign as Assign
from distribax.parameters.operations import AssignAdd as AssignAdd
from distribax.parameters.operations import AssignRows as AssignRows
from distribax.parameters.operations import Op as Op
from distribax.parameters.operations import Rows as Rows
from distribax.parameters.server import ParameterServer as ParameterServer
from distribax.parameters.spec import Endpoint as Endpoint
from distribax.parameters.spec import OptimizerSpec as OptimizerSpec
from distribax.parameters.spec import ParameterSpec as ParameterSpec
