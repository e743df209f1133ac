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
        "positions are taken as they are", "integrations/watched.py:Watched.place",
        "if block.check_positions and not", "if not block.check_positions and not",
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
        "states along the sequence end at shards", "integrations/layers.py:check_layers",
        "if kind not in _SPREAD]", "if kind in ()]",
    ),
    Mutant(
        "recurrent layers of any class are spread", "integrations/layers.py:check_layers",
        "if recurrent and len(kinds) == recurrent:", "if len(kinds) >= recurrent:",
    ),
    Mutant(
        "accelerate adds its own context parallelism",
        "integrations/accelerate.py:RingParallelismConfig.cp_enabled",
        "return self._asks_for_mesh", "return self.cp_size > 1",
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
        "a loss of a subclass is not its own", "integrations/known_trainers.py:loss_of",
        "order[order.index(mixin) + 1 :]", "order",
    ),
    Mutant(
        "masked words' labels are moved", "integrations/trainer.py:_keeps_labels",
        'in ("ForMaskedLM", "ForTokenClassification")', "in ()",
    ),
    Mutant(
        "all ranks of a ring count in metrics",
        "integrations/trainer.py:RingTrainerMixin._of_first_ranks",
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
        "padding on the right is let in", "integrations/cache.py:RingHFCache.mask",
        "if given.shape[1] != kv_length or", "if given.shape[1] != kv_length and",
    ),
    Mutant(
        "gradients end at a cache", "integrations/cache.py:CachedMask.attend",
        "if torch.is_grad_enabled() and", "if not torch.is_grad_enabled() and",
    ),
    Mutant(
        "a head's softcap is forgotten", "integrations/heads.py:_named",
        "tuple(values(_SOFTCAPS))", "()",
    ),
    Mutant(
        "a model's modules are those of its first call", "integrations/watched.py:parts_of",
        "return Parts(models, places_of(named), head, with_router_loss(models), "
        "recurrent, averaged)",
        "return vars(module).setdefault('parts', "
        "Parts(models, places_of(named), head, with_router_loss(models), recurrent, averaged))",
    ),
]  # fmt: skip
