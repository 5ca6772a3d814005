"""Recorded requests: what the model had seen, and what it said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded output.

    ``context`` : int32[n], everything the model had seen, with no end-of-text token inside but those of earlier
    outputs.
    ``output`` : int32[m], the recorded output and the end-of-text token.
    """

    context: TokenIds
    output: TokenIds

    def text(self) -> TokenIds:
        """int32[n + m], both, a copy."""
        return np.concatenate([self.context, self.output])


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a stream.

    ``is_scored`` : False: it is learned as a completed request, and no draft is asked for.
    """

    row: Row
    is_scored: bool = True
