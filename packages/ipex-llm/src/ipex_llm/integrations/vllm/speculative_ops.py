# SPDX-License-Identifier: Apache-2.0
"""The ops of vLLM's C++ extension for CPUs that its speculative decoding calls: drafts, their checks, their slots.

All work on a few numbers of each sequence, except for the draw of a token in the place of one that was not accepted.
Drafts lie one after the other; ``cu_num_draft_tokens`` has the running sum of their counts, without a zero in front.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _ranges(sums: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each sequence with the begin and end of its drafts."""
    begin = 0
    for row, end in enumerate(sums.tolist()):
        yield row, begin, end
        begin = end


def rejection_greedy_sample(
    output_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    target_argmax: Tensor,
    bonus_token_ids: Tensor,
    is_greedy: Tensor | None,
    max_spec_len: int,
) -> None:
    """Write the tokens of greedy sequences: the model's own up to the first that the draft has not, or all and one."""
    del max_spec_len
    bonus = bonus_token_ids.flatten()
    for row, begin, end in _ranges(cu_num_draft_tokens):
        if is_greedy is not None and not bool(is_greedy[row]):
            continue
        best = target_argmax[begin:end]
        wrong = (draft_token_ids[begin:end] != best).nonzero()
        count = int(wrong[0]) + 1 if wrong.numel() else end - begin
        output_token_ids[row, :count] = best[:count]
        if not wrong.numel():
            output_token_ids[row, count] = bonus[row]


def rejection_random_sample(
    output_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    bonus_token_ids: Tensor,
    recovered_token_ids: Tensor,
    uniform_probs: Tensor,
    is_greedy: Tensor,
    max_spec_len: int,
    vocab_size: int,
    no_draft_probs: bool,
) -> None:
    """Write the tokens of sampled sequences: drafts while they are accepted, then another token, or one more.

    A draft is accepted with the probability ``target / draft``, at most 1.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
    """
    del max_spec_len, vocab_size
    bonus = bonus_token_ids.flatten()
    for row, begin, end in _ranges(cu_num_draft_tokens):
        if bool(is_greedy[row]):
            continue
        drafts = draft_token_ids[begin:end]
        places = drafts.clamp(min=0)[:, None]
        target = target_probs[begin:end].gather(1, places)[:, 0]
        if no_draft_probs or draft_probs is None:
            draft = torch.ones_like(target)
        else:
            draft = draft_probs[begin:end].gather(1, places)[:, 0]
        # Without a division, so that a draft of probability 0 is refused and no NaN is made.
        accepted = (drafts >= 0) & (draft > 0) & (target >= uniform_probs[begin:end] * draft)
        refused = (~accepted).nonzero()
        count = int(refused[0]) if refused.numel() else end - begin
        output_token_ids[row, :count] = drafts[:count]
        last = recovered_token_ids[begin + count] if refused.numel() else bonus[row]
        output_token_ids[row, count] = last


def expand(
    output: Tensor, input: Tensor, cu_num_tokens: Tensor, replace_from: int, replace_to: int
) -> None:
    """Write the number of each sequence for each of its tokens; ``replace_from`` becomes ``replace_to``."""
    values = torch.where(input == replace_from, replace_to, input)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    whole = values.repeat_interleave(counts)
    output[: whole.shape[0]] = whole


def sample_recovered_tokens(
    output_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    inv_q: Tensor,
    vocab_size: int,
    no_draft_probs: bool,
) -> None:
    """Draw the token for the place of each draft from what the target has more of than the draft.

    ``inv_q`` ``[sequences, vocabulary]`` has the inverses of exponential random numbers: the largest product with a
    probability is a draw. Tokens are a row of numbers, ``[tokens]`` or ``[tokens, 1]``.
    """
    del vocab_size
    draft_token_ids, output_token_ids = draft_token_ids.flatten(), output_token_ids.view(-1)
    for row, begin, end in _ranges(cu_num_draft_tokens):
        if begin == end:
            continue
        rest = target_probs[begin:end]
        if no_draft_probs or draft_probs is None:
            rest = rest.scatter(1, draft_token_ids[begin:end].clamp(min=0)[:, None], 0.0)
        else:
            rest = (rest - draft_probs[begin:end]).clamp(min=0)
        output_token_ids[begin:end] = (rest * inv_q[row]).argmax(-1)


def eagle_prepare_inputs_padded(
    cu_num_draft_tokens: Tensor,
    valid_sampled_tokens_count: Tensor,
    query_start_loc: Tensor,
    token_indices_to_sample: Tensor,
    num_rejected_tokens: Tensor,
    num_reqs: int,
) -> None:
    """Write how many drafts of each sequence were refused, and the place of its last token that stays."""
    sums = cu_num_draft_tokens[:num_reqs]
    drafts = sums.diff(prepend=sums.new_zeros(1))
    refused = torch.where(drafts > 0, drafts + 1 - valid_sampled_tokens_count[:num_reqs], 0)
    num_rejected_tokens[:num_reqs] = refused
    token_indices_to_sample[:num_reqs] = query_start_loc[1 : num_reqs + 1] - 1 - refused


def eagle_prepare_next_token_padded(
    sampled_token_ids: Tensor,
    discard_request_mask: Tensor,
    backup_next_token_ids: Tensor,
    next_token_ids: Tensor,
    valid_sampled_tokens_count: Tensor,
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
) -> None:
    """Write the last token of each sequence that is not -1 and their number; a spare token where all are."""
    tokens = sampled_token_ids[:num_reqs, :num_sampled_tokens_per_req]
    valid = (tokens != -1) & (tokens < vocab_size) & ~discard_request_mask[:num_reqs, None]
    places = torch.arange(tokens.shape[1])
    last = torch.where(valid, places, -1).amax(-1)
    found = tokens.gather(1, last.clamp(min=0)[:, None])[:, 0]
    next_token_ids[:num_reqs] = torch.where(last < 0, backup_next_token_ids[:num_reqs], found)
    valid_sampled_tokens_count[:num_reqs] = valid.sum(-1)


def eagle_step_slot_mapping_metadata(
    positions: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out_clamped_positions: Tensor,
    out_slot_mapping: Tensor,
    block_size: int,
    max_model_len: int,
    pad_id: int,
) -> None:
    """Go one position on in each sequence: write positions, slots and lengths; those at the end go to the padding."""
    count = positions.shape[0]
    after = positions + 1
    ended = after >= max_model_len
    after = torch.where(ended, 0, after)
    blocks = (after // block_size).clamp(max=block_table.shape[1] - 1)
    slots = block_table[:count].gather(1, blocks.long()[:, None])[:, 0].long()
    slots = slots * block_size + after % block_size
    out_clamped_positions[:count] = after
    out_slot_mapping[:count] = torch.where(ended, pad_id, slots)
    out_slot_mapping[count:] = pad_id
    seq_lens[:count] = torch.where(ended, 1, seq_lens[:count] + 1).clamp(max=max_model_len)


def copy_and_expand_eagle_inputs(
    target_token_ids: Tensor,
    target_positions: Tensor,
    next_token_ids: Tensor,
    out_input_ids: Tensor,
    out_positions: Tensor,
    out_is_rejected_token_mask: Tensor,
    out_is_masked_token_mask: Tensor,
    out_new_token_indices: Tensor,
    out_hidden_state_mapping: Tensor,
    query_start_loc: Tensor,
    query_end_loc: Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    total_input_tokens: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
) -> None:
    """Write the inputs of a draft model: the tokens that stay, the new one, places for drafts, and those refused.

    With ``shift_input_ids`` a draft model gets the hidden state of a token with the token after it: the first token
    of each sequence is left out.
    """
    del total_input_tokens
    extra, shift = num_padding_slots_per_request, int(shift_input_ids)
    starts = query_start_loc.tolist()
    for row, end in enumerate(query_end_loc.tolist()):
        start, after = starts[row], starts[row + 1]
        stay = end - start + 1 - shift
        refused = after - end - 1
        size = stay + extra + refused
        first = start + row * (extra - shift)
        place = torch.arange(size)
        ids = torch.full((size,), padding_token_id)
        ids[:stay] = target_token_ids[start + shift : start + shift + stay]
        ids[stay] = next_token_ids[row]
        ids[stay + 1 : stay + extra] = parallel_drafting_token_id
        whole = slice(first, first + size)
        out_input_ids[whole] = ids
        away = place >= stay + extra
        out_positions[whole] = torch.where(away, 0, target_positions[start] + place)
        out_is_rejected_token_mask[whole] = away
        out_is_masked_token_mask[whole] = (place > stay) & ~away
        new = torch.arange(first + stay, first + stay + extra)
        out_new_token_indices[row * extra : (row + 1) * extra] = new
        if shift:
            out_hidden_state_mapping[start:after] = torch.arange(first, first + after - start)
