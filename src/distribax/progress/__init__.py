"""What takes long: shown in a terminal while it runs, one line in the log elsewhere."""

from __future__ import annotations

from distribax.progress.modes import ProgressMode as ProgressMode
from distribax.progress.modes import get_progress as get_progress
from distribax.progress.modes import set_progress as set_progress
from distribax.progress.waits import Wait as Wait
from distribax.progress.waits import show as show
