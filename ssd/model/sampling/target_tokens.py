"""Computes the target's tokens from its logits: penalties, temperature, truncation and keyed noise.

Every rule is applied at each draft position with that position's own prefix, i.e. the output so far and the draft
tokens before the position. So the token at a position is the token that decoding without drafts would sample there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import SamplingContext
from ssd.model.cpu.cpu_sampling import LOWEST_TEMPERATURE, MASS_OF_ONE, DeviceRules, masses_of, rule_out
from ssd.model.kv.tree import Parents, path_to
from ssd.model.sampling.sampler import Noise, PassOutput, argmax_with_noise, greedy_tokens, host_tokens, log_min_p
from ssd.token_rules import BadWords

_FIRST_TOP = 256


def target_tokens(output: PassOutput, rows: Sequence[SamplingContext]) -> npt.NDArray[np.int64]:
    """Sample the target's token at each position of a verification pass, int64[B, T].

    ``output`` is the output of a forward pass over the last token and the draft tokens of each of ``rows``. Tokens that
    the pass has already sampled on the device are returned unchanged. Row b has ``rows[b].width`` positions; later
    values are undefined.
    """
    known = [] if output.sampled is None else [b for b, row in enumerate(rows) if _is_sampled(row, b, output.noise)]
    if output.sampled is not None and len(known) == len(rows):
        return output.sampled.cpu().numpy()
    logits = logits_with_rules(output.logits, rows)
    sampled = [b for b, row in enumerate(rows) if not row.params.greedy and b not in known]
    if not sampled and not known:
        return greedy_tokens(logits)
    chosen = np.zeros(logits.shape[:2], np.int64)
    if len(sampled) + len(known) < len(rows):
        chosen[:] = greedy_tokens(logits)
    if output.sampled is not None and known:
        chosen[known] = output.sampled.cpu().numpy()[known]
    if sampled:
        chosen[_position_indices(rows, sampled)] = _sample_rows(logits, rows, sampled)
    return chosen


def sampling_scores(logits: torch.Tensor, row: SamplingContext) -> torch.Tensor:
    """Return the scores of all tokens after penalties, temperature, truncation and all other rules, float32[T, V].

    Scores are log-probabilities plus a constant, or -inf for excluded tokens. The row's draft must be a chain.
    ``logits`` [>= T, V] are the model's unmodified logits at the row's T positions. For a greedy row no temperature is
    applied.
    """
    scores = logits_with_rules(logits[None, : row.width], [row])[0]
    return scores.float() if row.params.greedy else truncated_scores(scores, [row.params] * row.width)


# Padding positions are skipped, because they would cost as much as the tokens of a short draft.
def _position_indices(rows: Sequence[SamplingContext], picks: Sequence[int]) -> tuple[npt.NDArray[np.int64], ...]:
    counts = [rows[b].width for b in picks]
    return np.repeat(np.array(picks), counts), np.concatenate([np.arange(count) for count in counts])


def _sample_rows(logits: torch.Tensor, rows: Sequence[SamplingContext], picks: Sequence[int]) -> npt.NDArray[np.int64]:
    keys = np.concatenate([rows[b].noise_keys() for b in picks])
    if logits.device.type == "cpu":
        return host_tokens(logits, picks, [rows[b].width for b in picks], [rows[b].params for b in picks], keys)
    params = [rows[b].params for b in picks for _ in range(rows[b].width)]
    return argmax_with_noise(truncated_scores(logits[_position_indices(rows, picks)], params), keys)


def has_rules(row: SamplingContext) -> bool:
    """Return whether penalties, a bias, a grammar or other rules change the row's logits at this step."""
    return _has_request_rules(row.params) or len(row.output) < row.params.min_tokens or row.grammar is not None


def _is_sampled(row: SamplingContext, b: int, noise: Noise | None) -> bool:
    """Return whether the forward pass with ``noise`` has already sampled the tokens of row b on the device."""
    if row.params.greedy:
        return not has_rules(row)
    return noise is not None and bool(noise.temperatures[b, 0] > 0)


def logits_with_rules(logits: torch.Tensor, rows: Sequence[SamplingContext]) -> torch.Tensor:
    """Return logits, [B, T, V], after bias, penalties and forbidden tokens; the same tensor if no row has rules."""
    ruled = [b for b, row in enumerate(rows) if has_rules(row)]
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


def _at_node(row: SamplingContext, parents: Parents, node: int) -> SamplingContext:
    """Return a copy of ``row`` whose context ends at a node of the draft tree, so that rules can be applied there."""
    assert row.grammar is None
    path = row.draft.token_ids[path_to(parents, node)]
    return row.with_text(np.concatenate([row.context, path]), row.prompt_length)


def truncated_scores(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return scores after temperature, top-k, top-p and min-p, float32[N, V]; dropped tokens have -inf.

    The scores are log-probabilities plus a constant. ``logits`` is [N, V]; row n has the parameters params[n], with
    temperature > 0. The order is that of transformers: top-p applies to the tokens that top-k keeps, and min-p comes
    last. In vLLM, min-p comes first.
    """
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], device=device)
    scores = logits.float() / temperature.clamp_min(LOWEST_TEMPERATURE)[:, None]
    cut = [n for n, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if cut:
        scores[cut] = _apply_top_k_top_p(scores[cut], [params[n] for n in cut])
    floor = [n for n, p in enumerate(params) if p.min_p > 0.0]
    if floor:
        part = scores[floor]
        lowest = part.amax(-1, keepdim=True) + torch.tensor([[log_min_p(params[n])] for n in floor], device=device)
        scores[floor] = part.masked_fill(part < lowest, float("-inf"))
    return scores


def _apply_top_k_top_p(scores: torch.Tensor, params: Sequence[SamplingParams], look: int = _FIRST_TOP) -> torch.Tensor:
    """Set the scores of tokens that top-k and top-p drop to -inf; tokens as probable as the last kept token are kept.

    Usually few tokens are kept, and sorting the whole vocabulary takes longer than a decoding step of a small model. So
    first only the ``look`` most probable tokens are examined. A row is sorted completely only if these are too few.
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
        # If top-k keeps more tokens than were examined, the mass that top-p is a share of is unknown too.
        is_open = (top_k > look) & (kept[:, -1] | (~is_all & (top_k < vocab_size)))
        undecided = is_open.nonzero()[:, 0].tolist()
        if undecided:
            cut[undecided] = _apply_top_k_top_p(scores[undecided], [params[n] for n in undecided], vocab_size)
    return cut


def _masses(scores: torch.Tensor) -> torch.Tensor:
    """Return integers proportional to the tokens' probabilities, which top-p adds up; on a CPU, those of `masses_of`.

    The sum of integers does not depend on the order of summation.
    """
    if scores.device.type == "cpu":
        return torch.from_numpy(masses_of(scores.contiguous().numpy()))
    return (torch.exp(scores - scores.amax(-1, keepdim=True)) * MASS_OF_ONE).long()


def depends_on_prefix(params: SamplingParams) -> bool:
    """Return whether a request has penalties, a bias, bad words or other rules that change its logits.

    Without such rules, sampling a position needs only its logits and noise, not the tokens before.
    """
    return bool(params.min_tokens) or _has_request_rules(params)


def _has_request_rules(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
    )


def apply_prefix_rules(logits: torch.Tensor, row: SamplingContext) -> None:
    """Apply a request's logit bias, penalties and forbidden tokens to the logits of its positions, [T, V], in place.

    At position t, the output is followed by the draft's first t tokens. All definitions are vLLM's. Bias is applied
    before penalties, as in vLLM and transformers. The repetition penalty counts tokens of prompt and output (Keskar et
    al. 2019, section 4.1). Presence and frequency penalties (OpenAI) and bad words consider only the output.
    """
    params = row.params
    vocab_size = logits.shape[-1]
    counts = np.bincount(row.output, minlength=vocab_size)[:vocab_size].astype(np.float32)
    seen = counts > 0
    if params.repetition_penalty != 1.0:
        seen[row.prompt] = True
    draft = row.draft.token_ids
    rules = DeviceRules.from_rules(params.rules, vocab_size, logits.device)
    rules.add_bias(logits[: row.width])
    bad_words = params.rules.bad_words
    state = BadWords.START if bad_words is None else bad_words.after(row.output)
    by_grammar = row.grammar.masks(draft) if row.grammar is not None else []
    for t in range(row.width):
        if t:
            token = int(draft[t - 1])
            counts[token] += 1
            seen[token] = True
            if bad_words is not None:
                state = bad_words.move(state, token)
        scores = logits[t]
        if params.repetition_penalty != 1.0:
            ids = torch.from_numpy(np.flatnonzero(seen)).to(logits.device)
            old = scores[ids]
            factor = params.repetition_penalty
            scores[ids] = torch.where(old > 0, old / factor, old * factor)
        if params.presence_penalty or params.frequency_penalty:
            penalty = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            scores -= torch.from_numpy(penalty.astype(np.float32)).to(scores)
        forbidden = set() if bad_words is None else bad_words.ends(state)
        if len(row.output) + t < params.min_tokens:
            forbidden |= set(row.forbidden_ids)
        # Positions after a token that the grammar refuses are never used.
        rule_out(scores, by_grammar[t] if t < len(by_grammar) else None, rules.allowed, forbidden)


def make_noise(rows: Sequence[SamplingContext], width: int) -> Noise | None:
    """Return the noise with which a forward pass can sample the tokens of ``rows`` on the device.

    This is possible for rows that are sampled with a temperature and no other rules. All other rows get temperature 0
    and no noise. If no row can be sampled on the device, None is returned. ``width`` is the number of positions per
    row.
    """
    drawn = [b for b, row in enumerate(rows) if has_only_temperature(row)]
    if not drawn:
        return None
    keys, temperatures = np.zeros((len(rows), width), np.uint64), np.zeros((len(rows), width), np.float32)
    # Values beyond a row's positions are meaningless.
    temperatures[drawn] = np.array([rows[b].params.temperature for b in drawn], np.float32)[:, None]
    by_position = [b for b in drawn if rows[b].draft.parents is None and not rows[b].noise.is_coupled]
    if by_position:
        noises, lengths = [rows[b].noise for b in by_position], [len(rows[b].context) for b in by_position]
        keys[by_position] = SequenceNoise.seeded_keys(noises, lengths, width)
    for b in set(drawn).difference(by_position):
        own = rows[b].noise_keys()
        keys[b, : len(own)] = own
    return Noise(keys, temperatures)


def has_only_temperature(row: SamplingContext) -> bool:
    """Return whether the row is sampled with a temperature above 0 and no other rules, such as top-p or penalties."""
    params = row.params
    if params.greedy:
        return False
    if not np.float32(params.temperature) > 0:  # greedy, or too close to it for a float32
        return False
    is_cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return not (is_cut or has_rules(row))
