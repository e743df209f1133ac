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
        "any labels will do", "integrations/losses.py:check_labels", "if not right:", "if False:",
    ),
    Mutant(
        "any mask of padding will do", "integrations/models.py:RingForward.check_whole",
        "given.shape == mine.shape and are_equal(given, mine)", "True",
    ),
    Mutant(
        "losses stay spread after the block", "integrations/losses.py:own_losses",
        "losses.update(before)", "pass",
    ),
    Mutant(
        "no layer need be spread", "integrations/models.py:RingForward.__exit__",
        "if kind is None and not self._attended", "if False",
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
        "a window that is not its mask's is taken", "integrations/calls.py:check_call",
        "if window is not None and", "if window is None and",
    ),
    Mutant(
        "keys of earlier tokens are forgotten", "integrations/models.py:RingForward.check_whole",
        "if q_length != kv_length or any(offsets):", "if False:",
    ),
    Mutant(
        "a trainer's own mask of a model counts", "integrations/models.py:_attention",
        "if not isinstance(attention_mask, RingMask):", "if attention_mask is None:",
    ),
    Mutant(
        "states along the sequence end at shards", "integrations/layers.py:check_layers",
        "kinds - _SPREAD", "kinds - kinds",
    ),
    Mutant(
        "frequencies depend on the shard", "integrations/layers.py:_check_rotary",
        "length > trained", "length < 0",
    ),
    Mutant(
        "batches that are accumulated have a mean each",
        "integrations/trainer.py:RingTrainerMixin.compute_loss",
        "forward.num_items = num_items_in_batch", "pass",
    ),
    Mutant(
        "accelerate's own context parallelism is let in",
        "integrations/trainer.py:RingTrainerMixin._check_trainer",
        'getattr(self.accelerator.parallelism_config, "cp_enabled", False)', "False",
    ),
    Mutant(
        "accelerate adds its own context parallelism",
        "integrations/accelerate.py:RingParallelismConfig.cp_enabled",
        "return self._asks_for_mesh", "return self.cp_size > 1",
    ),
    Mutant(
        "a model's own loss is taken for ours", "integrations/outputs.py:check_output",
        "if len(scalars) > losses:", "if False:",
    ),
    Mutant(
        "what is pooled of a shard comes out", "integrations/outputs.py:_check_tokens",
        "of_tokens = shape[:2] == (b, n)", "of_tokens = True",
    ),
    Mutant(
        "columns are taken for tokens", "integrations/outputs.py:_check_tokens",
        "not _widths_of(module).intersection(batch.counts)", "True",
    ),
    Mutant(
        "labels of masked words are moved", "integrations/losses.py:loss_of",
        "in_place and batch.in_place is not None", "False",
    ),
    Mutant(
        "a model's own cross entropy is let through", "integrations/watched.py:Watched.entropy",
        "if self.model is None or", "if self.model is not None or",
    ),
    Mutant(
        "the padding's index is not skipped", "integrations/positions.py:counted_by",
        "if module.padding_idx is None:", "if True:",
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
        "what is wrong with a mask is not told", "integrations/models.py:RingForward.check",
        "mask.error or error_of", "error_of",
    ),
    Mutant(
        "attention that nobody asks for is let in", "integrations/layers.py:check_own_attention",
        "if not is_text or", "if is_text or",
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
        "temperatures depend on the shard", "integrations/layers.py:_check_counting",
        '"attn_temperature_tuning", False)', '"attn_temperature_tuning", False) and False',
    ),
    Mutant(
        "words have neighbours of the shard", "integrations/layers.py:_check_counting",
        '"trigram_input", False)', '"trigram_input", False) and False',
    ),
    Mutant(
        "padding is routed, too", "integrations/routers.py:balance",
        "if attention_mask is not None:", "if False:",
    ),
    Mutant(
        "a model of two models is one", "integrations/watched.py:Outermost._begins",
        "models[:1]", "models[:0]",
    ),
    Mutant(
        "any trainer's loss will do", "integrations/known_trainers.py:loss_of",
        "if own := [", "if False and [",
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
        "what fills up the last batch counts in metrics",
        "integrations/trainer.py:RingTrainerMixin._gather_for_metrics",
        "return found[:last] if t.ndim and last > 0 else found", "return found",
    ),
    Mutant(
        "numbers are cut as samples are",
        "integrations/trainer.py:RingTrainerMixin._gather_for_metrics",
        "if t.ndim and last > 0", "if last > 0",
    ),
    Mutant(
        "what fills up the last batch counts in its loss",
        "integrations/trainer.py:RingTrainerMixin._without_repeats",
        "labels.masked_fill(repeats[:, None], -100)", "labels",
    ),
    Mutant(
        "NEFTune's noise is each shard's",
        "integrations/trainer.py:RingTrainerMixin._check_trainer",
        "and self.neftune_noise_alpha is not None", "and False",
    ),
    Mutant(
        "parts of batches are let in", "integrations/trainer.py:RingTrainerMixin._check_trainer",
        "and self.accelerator.dispatch_batches", "and False",
    ),
    Mutant(
        "groups reach over rings", "integrations/grpo.py:RingGRPOTrainer._check_trainer",
        "if samples % self.num_generations:", "if False:",
    ),
    Mutant(
        "rewards are scaled by copies", "integrations/grpo.py:RingGRPOTrainer._check_trainer",
        'self.scale_rewards == "batch"', "False",
    ),
    Mutant(
        "generation needs no class", "integrations/trainer.py:RingTrainerMixin._check_trainer",
        "and not self._generates", "and False",
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
        "padding is seen in a cache", "integrations/cache.py:RingHFCache._ready",
        "self.keys.hide_before(starts)", "pass",
    ),
    Mutant(
        "drafts that were wrong stay", "integrations/cache.py:RingHFCache.crop",
        "self.keys.rollback(n)", "pass",
    ),
    Mutant(
        "beams go on from themselves", "integrations/cache.py:RingHFCache.reorder_cache",
        "self.keys.reorder(beams)", "pass",
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
        "windows do not count the token itself", "integrations/layers.py:windows_of",
        "window - 1", "window - 2",
    ),
    Mutant(
        "all tokens of all layers are kept", "integrations/cache.py:RingHFCache.__init__",
        "if spare is None else windows", "",
    ),
    Mutant(
        "a model's windows may be wider than its config's",
        "integrations/cache.py:RingHFCache.attend",
        "self._ensure(check, f\"layer {layer}: {{}}; with spare=None all tokens of it are kept\")",
        "pass",
    ),
    Mutant(
        "any attention may have the cache", "integrations/cache.py:RingHFCache._check_name",
        "if name in names:", "if True:",
    ),
    Mutant(
        "a layer's keys may be left out", "integrations/cache.py:RingHFCache.expect",
        "if self._new:", "if False:",
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
        "layers before a head are none of its own", "integrations/heads.py:_linear",
        "if more:", "if False:",
    ),
    Mutant(
        "a head's settings are read once", "integrations/heads.py:head_of",
        "if known != named or score is None:", "if score is None:",
    ),
    Mutant(
        "positions of three rows are documents", "training/batches.py:_packing",
        "if len(counted) == 4 else None", "",
    ),
    Mutant(
        "choices are tokens", "training/batches.py:_tokens", "t.ndim == ndim", "t.ndim >= 2",
    ),
    Mutant(
        "a mask of images is dropped", "integrations/multimodal.py:merged",
        "mask is not known", "False",
    ),
    Mutant(
        "a model's modules are those of its first call", "integrations/watched.py:parts_of",
        "return Parts(models, places_of(named), head, with_router_loss(models))",
        "return vars(module).setdefault("
        "'parts', Parts(models, places_of(named), head, with_router_loss(models)))",
    ),
]  # fmt: skip
