"""From logits to the target's tokens: penalties, temperature, truncation, keyed noise.

Every rule is applied at each draft position with that position's own prefix (output so far plus the draft tokens
before it), so the token at a position is the one plain decoding would have chosen there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import SamplingRow
from ssd.model.kv.tree import Parents, path_to
from ssd.model.sampling.row_choice import LOWEST_TEMPERATURE, MASS_OF_ONE, DeviceRules, masses_of, rule_out
from ssd.model.sampling.sampler import Noise, PassOutput, argmax_with_noise, host_tokens, log_min_p
from ssd.token_rules import BadWords

_FIRST_LOOK = 256


def target_tokens(output: PassOutput, rows: Sequence[SamplingRow]) -> npt.NDArray[np.int64]:
    """The token the target chooses at each position.

    output : of a pass over [last token, draft ...] of ``rows``, T wide; row b is used at its first ``rows[b].width``
    positions. Its noise is that of `noise_of`, if it has any.
    Returns int64[B, T]; what lies past a row's positions is meaningless.
    """
    known = [] if output.chosen is None else [b for b, row in enumerate(rows) if _is_known(row, b, output.noise)]
    if output.chosen is not None and len(known) == len(rows):
        return output.chosen.cpu().numpy()
    logits = with_prefix_rules(output.logits, rows)
    sampled = [b for b, row in enumerate(rows) if not row.params.greedy and b not in known]
    if not sampled and not known:
        return logits.argmax(-1).cpu().numpy()
    chosen = np.zeros(logits.shape[:2], np.int64)
    if len(sampled) + len(known) < len(rows):
        chosen[:] = logits.argmax(-1).cpu().numpy()
    if output.chosen is not None and known:
        chosen[known] = output.chosen.cpu().numpy()[known]
    if sampled:
        chosen[_positions(rows, sampled)] = _drawn(logits, rows, sampled)
    return chosen


def drawn_scores(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """What the tokens of a row whose draft is a chain are drawn with: log-probabilities up to a constant.

    logits : [>= T, V], the model's own at the row's T positions. Returns float32[T, V]; of greedy rows what they
    maximise.
    """
    scores = with_prefix_rules(logits[None, : row.width], [row])[0]
    return scores.float() if row.params.greedy else truncated_scores(scores, [row.params] * row.width)


# Only real positions are looked at: a short draft's padding would cost as much as its tokens.
def _positions(rows: Sequence[SamplingRow], picks: Sequence[int]) -> tuple[npt.NDArray[np.int64], ...]:
    """Of the rows picked all positions, one after another: two indices."""
    counts = [rows[b].width for b in picks]
    return np.repeat(np.array(picks), counts), np.concatenate([np.arange(count) for count in counts])


def _drawn(logits: torch.Tensor, rows: Sequence[SamplingRow], picks: Sequence[int]) -> npt.NDArray[np.int64]:
    """What the noise of the rows picked chooses at their positions, one after another."""
    keys = np.concatenate([rows[b].noise_keys() for b in picks])
    if logits.device.type == "cpu":
        return host_tokens(logits, picks, [rows[b].width for b in picks], [rows[b].params for b in picks], keys)
    params = [rows[b].params for b in picks for _ in range(rows[b].width)]
    return argmax_with_noise(truncated_scores(logits[_positions(rows, picks)], params), keys)


def is_ruled(row: SamplingRow) -> bool:
    """Whether the row's rules change the logits themselves, here."""
    return _has_rules(row.params) or len(row.output) < row.params.min_tokens or row.grammar is not None


def _is_known(row: SamplingRow, b: int, noise: Noise | None) -> bool:
    """Whether a pass that was given ``noise`` has chosen the tokens of ``row``, its row b."""
    if row.params.greedy:
        return not is_ruled(row)
    return noise is not None and bool(noise.temperatures[b, 0] > 0)


def with_prefix_rules(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The logits, [B, T, V], after each row's ``apply_prefix_rules``; the same tensor where no row has any."""
    ruled = [b for b, row in enumerate(rows) if is_ruled(row)]
    if ruled:
        logits = logits.clone()
        for b in ruled:
            row = rows[b]
            if row.draft.parents is None:
                apply_prefix_rules(logits[b], row)
            else:
                for node in range(row.width):
                    apply_prefix_rules(logits[b, node : node + 1], _at_node(row, row.draft.parents, node))
    return logits


def _at_node(row: SamplingRow, parents: Parents, node: int) -> SamplingRow:
    """The row that chooses the token after ``node`` of a tree alone: the path to it counts as output."""
    assert row.grammar is None
    path = row.draft.token_ids[path_to(parents, node)]
    return row.with_text(np.concatenate([row.context, path]), row.prompt_length)


def truncated_scores(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probabilities up to a constant, -inf where top-k, top-p or min-p rule a token out.

    logits : [N, V], row n under params[n] (temperature > 0). Returns float32[N, V].
    Order as in transformers: temperature, top-k, top-p, min-p (top-p on what top-k left; vLLM cuts by min-p first).
    """
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], device=device)
    scores = logits.float() / temperature.clamp_min(LOWEST_TEMPERATURE)[:, None]
    cut = [n for n, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if cut:
        scores[cut] = _cut_top(scores[cut], [params[n] for n in cut])
    floor = [n for n, p in enumerate(params) if p.min_p > 0.0]
    if floor:
        part = scores[floor]
        lowest = part.amax(-1, keepdim=True) + torch.tensor([[log_min_p(params[n])] for n in floor], device=device)
        scores[floor] = part.masked_fill(part < lowest, float("-inf"))
    return scores


def _cut_top(scores: torch.Tensor, params: Sequence[SamplingParams], look: int = _FIRST_LOOK) -> torch.Tensor:
    """Rule out what top-k and top-p leave out; what ties with the last token kept stays, so order never matters.

    Sorting a whole vocabulary costs more than a small model's step, and the kept tokens are nearly always few: the
    ``look`` best are looked at first, and only rows that they do not decide are sorted whole.
    """
    vocab_size = scores.shape[-1]
    look = min(look, vocab_size)
    top_k = torch.tensor(
        [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params], device=scores.device
    )
    top_p = torch.tensor([p.top_p for p in params], device=scores.device, dtype=torch.float64)
    best, tokens = torch.topk(scores, look)
    masses = _masses(scores)
    rank = torch.arange(look, device=scores.device)
    within = rank < top_k[:, None]
    among = masses.gather(-1, tokens).masked_fill_(~within, 0)
    whole = torch.where(top_k < vocab_size, among.sum(-1), masses.sum(-1))
    is_all = top_p >= 1.0
    wanted = (top_p * whole.double())[:, None]
    kept = within & (((among.cumsum(-1) - among).double() < wanted) | is_all[:, None] | (rank == 0))
    lowest = best.gather(-1, kept.sum(-1, keepdim=True) - 1)
    cut = scores.masked_fill(scores < lowest, float("-inf"))
    if look < vocab_size:
        # Where top-k takes more than was looked at, what top-p is a share of is not known either.
        is_open = (top_k > look) & (kept[:, -1] | (~is_all & (top_k < vocab_size)))
        undecided = is_open.nonzero()[:, 0].tolist()
        if undecided:
            cut[undecided] = _cut_top(scores[undecided], [params[n] for n in undecided], vocab_size)
    return cut


def _masses(scores: torch.Tensor) -> torch.Tensor:
    """See `masses_of`: the very same on a CPU, but for rounding elsewhere. int64[N, V]."""
    if scores.device.type == "cpu":
        return torch.from_numpy(masses_of(scores.contiguous().numpy()))
    return (torch.exp(scores - scores.amax(-1, keepdim=True)) * MASS_OF_ONE).long()


def needs_prefix(params: SamplingParams) -> bool:
    """True when a token's score depends on the tokens before it or is set by the request."""
    return bool(params.min_tokens) or _has_rules(params)


def _has_rules(params: SamplingParams) -> bool:
    """Whether the request has rules that hold for all of its output."""
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
    )


def apply_prefix_rules(logits: torch.Tensor, row: SamplingRow) -> None:
    """Bias, penalties and what may not be sampled, in place; position t sees the draft's first t tokens.

    logits : [T, V]. Definitions are vLLM's; bias comes before penalties, as in vLLM and transformers. The repetition
    penalty looks at prompt and output (Keskar et al. 2019, section 4.1), presence and frequency penalties (OpenAI) and
    bad words at the output alone.
    """
    params = row.params
    vocab_size = logits.shape[-1]
    counts = np.bincount(row.output, minlength=vocab_size)[:vocab_size].astype(np.float32)
    seen = counts > 0
    if params.repetition_penalty != 1.0:
        seen[row.prompt] = True
    draft = row.draft.token_ids
    rules = DeviceRules.of(params.rules, vocab_size, logits.device)
    rules.add_bias(logits[: row.width])
    bad_words = params.rules.bad_words
    said = BadWords.START if bad_words is None else bad_words.after(row.output)
    by_grammar = row.grammar.masks(draft) if row.grammar is not None else []
    for t in range(row.width):
        if t:
            token = int(draft[t - 1])
            counts[token] += 1
            seen[token] = True
            if bad_words is not None:
                said = bad_words.move(said, token)
        scores = logits[t]
        if params.repetition_penalty != 1.0:
            ids = torch.from_numpy(np.flatnonzero(seen)).to(logits.device)
            old = scores[ids]
            factor = params.repetition_penalty
            scores[ids] = torch.where(old > 0, old / factor, old * factor)
        if params.presence_penalty or params.frequency_penalty:
            penalty = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            scores -= torch.from_numpy(penalty.astype(np.float32)).to(scores)
        forbidden = set() if bad_words is None else bad_words.ends(said)
        if len(row.output) + t < params.min_tokens:
            forbidden |= set(row.forbidden_ids)
        # Positions after a token that the grammar refuses are never used.
        rule_out(scores, by_grammar[t] if t < len(by_grammar) else None, rules.allowed, forbidden)


def noise_of(rows: Sequence[SamplingRow], width: int) -> Noise | None:
    """What a pass over ``rows`` that is ``width`` positions wide needs to choose their tokens itself.

    Of rows that are sampled by temperature alone; all others have temperature 0. None where there is no such row.
    """
    drawn = [b for b, row in enumerate(rows) if is_by_temperature(row)]
    if not drawn:
        return None
    keys, temperatures = np.zeros((len(rows), width), np.uint64), np.zeros((len(rows), width), np.float32)
    # What lies past a row's own positions is meaningless.
    temperatures[drawn] = np.array([rows[b].params.temperature for b in drawn], np.float32)[:, None]
    by_position = [b for b in drawn if rows[b].draft.parents is None and not rows[b].noise.is_coupled]
    if by_position:
        noises, lengths = [rows[b].noise for b in by_position], [len(rows[b].context) for b in by_position]
        keys[by_position] = SequenceNoise.seeded_keys(noises, lengths, width)
    for b in set(drawn).difference(by_position):
        own = rows[b].noise_keys()
        keys[b, : len(own)] = own
    return Noise(keys, temperatures)


def is_by_temperature(row: SamplingRow) -> bool:
    """Whether the row's tokens are the argmax of `noisy_scores` with noise."""
    params = row.params
    if params.greedy:
        return False
    if not np.float32(params.temperature) > 0:  # greedy, or so near to it that a float32 does not tell
        return False
    is_cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return not (is_cut or is_ruled(row))
