"""Faults planted between models of transformers and their batches."""

from tests.faults.mutant import Mutant

INTEGRATIONS = [
    Mutant(
        "a window counts the token itself", "integrations/masks.py:_KINDS",
        'values["sliding_window"] - 1', 'values["sliding_window"]',
    ),
    Mutant(
        "a mask that is not known shows everything", "integrations/masks.py:_read",
        "kind = _KINDS.get(getattr(function, \"__code__\", None))",
        "kind = _KINDS.get(getattr(function, \"__code__\", None), lambda _: _ALL)",
    ),
    Mutant(
        "of two masks the first one counts", "integrations/masks.py:_both",
        "found = found & _read(part)", "found = found if found.window else _read(part)",
    ),
    Mutant(
        "positions are taken as they are", "integrations/watched.py:Watched.place",
        "if block.check_positions and not", "if not block.check_positions and not",
    ),
    Mutant(
        "any mask of padding will do", "integrations/models.py:RingForward.check_whole",
        "given.shape == mine.shape and are_equal(given, mine)", "True",
    ),
    Mutant(
        "layers of other masks share a plan", "integrations/models.py:RingForward.attend",
        "q.device, mask, sinks is None", "q.device, sinks is None",
    ),
    Mutant(
        "sinks are dropped", "integrations/models.py:_attention",
        'given.pop("s_aux", None)', 'given.pop("s_aux", None) and None',
    ),
    Mutant(
        "what attention does not have is ignored", "integrations/calls.py:check_call",
        "if unknown := sorted(asked - _IDLE):", "if unknown := sorted(asked - asked):",
    ),
    Mutant(
        "a trainer's own mask of a model counts", "integrations/models.py:_attention",
        "if not isinstance(attention_mask, RingMask):", "if attention_mask is None:",
    ),
    Mutant(
        "states along the sequence end at shards", "integrations/layers.py:check_layers",
        "if kind not in _SPREAD]", "if kind in ()]",
    ),
    Mutant(
        "recurrent layers of any class are spread", "integrations/layers.py:check_layers",
        "if recurrent and len(kinds) == recurrent:", "if len(kinds) >= recurrent:",
    ),
    Mutant(
        "frequencies depend on the shard", "integrations/layers.py:_check_rotary",
        "length > trained", "length < 0",
    ),
    Mutant(
        "accelerate adds its own context parallelism",
        "integrations/accelerate.py:RingParallelismConfig.cp_enabled",
        "return self._asks_for_mesh", "return self.cp_size > 1",
    ),
    Mutant(
        "what is pooled of a shard comes out", "integrations/outputs.py:_check_tokens",
        "of_tokens = shape[:2] == (b, n)", "of_tokens = True",
    ),
    Mutant(
        "labels of masked words are moved", "integrations/losses.py:loss_of",
        "in_place and batch.in_place is not None", "False",
    ),
    Mutant(
        "attention that is handed positions has used them",
        "integrations/watched.py:Watched.are_placed",
        "placed = self.placed or in_backward()", "placed = True",
    ),
    Mutant(
        "the first real token is taken for the last", "integrations/pooling.py:of_last_token",
        "(places * real)", "real",
    ),
    Mutant(
        "towers look for ours in their tables", "integrations/layers.py:is_tower_by_name",
        "return is_tower and", "return not is_tower and",
    ),
    Mutant(
        "a head looks for a token in a shard", "integrations/layers.py:check_reading",
        "in _SEARCHING", "in (type(model).__name__,)",
    ),
    Mutant(
        "a model of two models is one", "integrations/watched.py:Outermost._begins",
        "models[:1]", "models[:0]",
    ),
    Mutant(
        "a loss of a subclass is not its own", "integrations/known_trainers.py:loss_of",
        "order[order.index(mixin) + 1 :]", "order",
    ),
    Mutant(
        "masked words' labels are moved", "integrations/trainer.py:_keeps_labels",
        'in ("ForMaskedLM", "ForTokenClassification")', "in ()",
    ),
    Mutant(
        "all ranks of a ring count in metrics",
        "integrations/trainer.py:RingTrainerMixin._gather_for_metrics",
        "ranks[:: self._alike]", "ranks",
    ),
    Mutant(
        "tokens' log-probabilities are one place late",
        "integrations/whole.py:_of_whole_sequences", "[:, :-1]", "[:, 1:]",
    ),
    Mutant(
        "a rank scores what it has", "integrations/whole.py:spread_scores",
        "return spread.opened[-1].batch.unshard(scores) if", "return scores if",
    ),
    Mutant(
        "a probe takes any loss", "integrations/probe.py:probe", "int(report.same)", "1",
    ),
    Mutant(
        "a cache has no windows", "integrations/cache.py:CachedMask.attend",
        "self.visible.window", "None",
    ),
    Mutant(
        "a cache has no sinks", "integrations/cache.py:CachedMask.attend", '"sinks": sinks',
        '"sinks": None',
    ),
    Mutant(
        "chunks of a prompt begin anew", "integrations/cache.py:RingHFCache.prefill",
        "places[:, at + mine]", "places[:, mine]",
    ),
    Mutant(
        "padding on the right is let in", "integrations/cache.py:RingHFCache.mask",
        "if given.shape[1] != kv_length or", "if given.shape[1] != kv_length and",
    ),
    Mutant(
        "gradients end at a cache", "integrations/cache.py:CachedMask.attend",
        "if torch.is_grad_enabled() and", "if not torch.is_grad_enabled() and",
    ),
    Mutant(
        "any way to logits will do", "integrations/heads.py:_measured",
        "max(1e-5, 8 * torch.finfo(hidden.dtype).eps)", "torch.inf",
    ),
    Mutant(
        "a head's softcap is forgotten", "integrations/heads.py:_named",
        "tuple(values(_SOFTCAPS))", "()",
    ),
    Mutant(
        "choices are tokens", "training/batches.py:_tokens", "t.ndim == ndim", "t.ndim >= 2",
    ),
    Mutant(
        "a model's modules are those of its first call", "integrations/watched.py:parts_of",
        "return Parts(models, places_of(named), head, with_router_loss(models))",
        "return vars(module).setdefault("
        "'parts', Parts(models, places_of(named), head, with_router_loss(models)))",
    ),
]  # fmt: skip
