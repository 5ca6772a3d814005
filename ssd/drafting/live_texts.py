"""What running requests of one namespace have said: each may draft from the others before any has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LiveTexts:
    """Texts of running requests at one step; made anew for the next, so that nothing of an ended one is left.

    ``texts`` : int32[n] each, views: the end of a prompt, of ``lead_ins[i]`` tokens, and the output so far.
    """

    texts: Sequence[npt.NDArray[np.int32]]
    lead_ins: Sequence[int]
