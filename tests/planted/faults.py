# ruff: noqa: E501
"""Small faults in decision code, each with the tests that must find it.

`old` occurs once in `path` and is replaced by `new`; then at least one of `tests` must fail. A fault that no test finds
is a gap in the tests, whatever their coverage.
"""

from __future__ import annotations

from dataclasses import dataclass

REQUESTS, DISPATCH, PICK, WORKERS, LOSSES = (
    f"coordinator/policy/{name}.py" for name in ("requests", "dispatch", "pick", "workers", "losses")
)
T_QUOTAS, T_KEYS = "tests/coordinator/test_policy_quotas.py", "tests/coordinator/test_api_keys.py"
T_BATCHES = "tests/batches/test_batches.py"
T_TLS = "tests/runtime/test_tls.py"
T_SECURITY, T_BAD, T_CHAT = (
    "tests/cluster/test_security.py",
    "tests/coordinator/test_bad_input.py",
    "tests/coordinator/test_chat.py",
)
CHOICE = "coordinator/policy/choice.py"
FAIR_QUEUE, T_FAIR_QUEUE = "coordinator/policy/fair_queue.py", "tests/coordinator/test_policy_fair_queue.py"
POOL, MEMBERSHIP = "coordinator/policy/pool.py", "coordinator/policy/membership.py"
OVERTAKING, T_OVERTAKING = "coordinator/policy/overtaking.py", "tests/coordinator/test_policy_overtaking.py"
LONG_ROWS = "baton/core/long_rows.py"
TIMELINE, T_TIMELINE = "coordinator/policy/timeline.py", "tests/coordinator/test_policy_timeline.py"
POLICY_SPLIT, T_SPLIT = "coordinator/policy/split.py", "tests/coordinator/test_policy_split.py"
D_SCHEDULER, T_PROMPTS = "decode/scheduler.py", "tests/decode/test_prompts.py"
T_REQUESTS, T_DISPATCH, T_WORKERS, T_JOURNAL, T_PICK, T_CLASSES = (
    f"tests/coordinator/test_policy_{name}.py"
    for name in ("requests", "dispatch", "workers", "journal", "pick", "classes")
)
T_GRAMMARS, T_MASKS = "tests/engine/test_grammars.py", "tests/engine/test_mask_processes.py"
QUEUE, T_QUEUE = "coordinator/policy/grammar_queue.py", "tests/coordinator/test_policy_grammar_queue.py"
T_POOLING = "tests/coordinator/test_pooling.py"
T_PIPELINE = "tests/coordinator/test_pipeline.py"


@dataclass(frozen=True)
class Fault:
    path: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.path}: {' '.join(self.old.split())[:60]}"


FAULTS = (
    Fault(DISPATCH, "self._to_come.total() + choices", "choices", T_DISPATCH),
    Fault(
        "coordinator/policy/quotas.py",
        "        account.running += choices\n",
        "        account.running += 1\n",
        T_QUOTAS,
    ),
    Fault("batches/routes.py", 'not in (b"utf-8", b"utf8"):', "in ():", T_BATCHES),
    Fault(
        "coordinator/text/parser.py",
        '    return _HALVES.sub("\\ufffd", text)',
        "    return text",
        "tests/coordinator/test_tools.py",
    ),
    Fault(
        REQUESTS,
        "        self._no_deadline_before = min(self._no_deadline_before, choice.deadline_at)\n",
        "        self._no_deadline_before = choice.deadline_at\n",
        T_REQUESTS,
    ),
    Fault(
        "coordinator/http/server.py",
        "        if self._in_head:  # trailers are not used",
        "        if True:",
        "tests/coordinator/test_http_abuse.py",
    ),
    Fault(
        "coordinator/http/server.py",
        "            self._start_unread_timer()\n        else:",
        "            self._start_unread_timer()\n        elif self._in_head:",
        "tests/coordinator/test_http_abuse.py",
    ),
    Fault(
        "baton/engine/kernels/cpu/sampling.cpp",
        "(vocab - first > 8 ? eight[1] << 8 : 0)",
        "(eight[0] << 8)",
        "tests/engine/test_sampler_ways.py",
    ),
    Fault(
        "coordinator/http/server.py",
        '            raise ValueError("too many pipelined requests")',
        "            pass",
        "tests/coordinator/test_http_abuse.py",
    ),
    Fault("coordinator/http/app.py", "await asyncio.sleep(0)", "pass", "tests/coordinator/test_several_prompts.py"),
    # Security, by the rows of docs/security.md.
    Fault("baton/core/blocks.py", "import struct\n", "import pickle  # S-1\nimport struct\n", "tests/arch"),
    Fault(
        "baton/runtime/json_body.py",
        "        return json.loads(text, ",
        "        __import__('os').system('true')  # S-2\n        return json.loads(text, ",
        T_SECURITY,
    ),
    Fault(
        "baton/runtime/json_body.py",
        "        return json.loads(text, object",
        "        import pickle  # S-3\n\n        if text.startswith('cos'):\n            pickle.loads(text.encode())\n        return json.loads(text, object",
        T_SECURITY,
    ),
    Fault(
        "baton/runtime/streams.py",
        'open_port(server, host, port, "link"',
        'open_port(server, "0.0.0.0", port, "link"',
        T_SECURITY,
    ),
    Fault(
        "coordinator/http/body.py",
        "    if count_values(parsed, MAX_VALUES) > MAX_VALUES:",
        "    if False:",
        "tests/coordinator/test_http_body.py",
    ),
    Fault("coordinator/openai/validation.py", "            elif name not in served:", "            elif False:", T_BAD),
    Fault("baton/core/handover.py", "    if not signed:", "    if False:", "tests/core/test_handles.py"),
    Fault("baton/core/handover.py", "        if claimed != true:", "        if False:", "tests/core/test_handles.py"),
    Fault(
        "decode/worker.py",
        '            raise JoinRefused(f"link refused: tensor_parallel: {e.message}", param="tensor_parallel") from None',
        "            pass",
        "tests/decode tests/runtime",
    ),
    Fault(
        "coordinator/translate.py",
        'check_range("n", options.n, 1, MAX_CHOICES)',
        'check_range("n", options.n, 1, 10**9)',
        T_BAD,
    ),
    Fault(
        "coordinator/structured_output.py",
        "asyncio.timeout(COMPILE_S)",
        "asyncio.timeout(20.0)",
        "tests/coordinator/test_structured_output.py",
    ),
    Fault(
        "coordinator/text/template.py",
        "        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)",
        "        pass",
        T_CHAT,
    ),
    Fault(
        "coordinator/text/model.py",
        "        if len(text) <= INLINE_CHARS:\n            return self.encode(text, add",
        "        if True:\n            return self.encode(text, add",
        "tests/coordinator/test_text.py",
    ),
    Fault("coordinator/text/chat.py", "if t.special or t.content in literals]", "if t.content in literals]", T_CHAT),
    Fault(
        "coordinator/http/guard.py",
        'if scope["path"] not in OPEN_PATHS:',
        'if not scope["path"].startswith(OPEN_PATHS[1:]):',
        T_KEYS,
    ),
    Fault("coordinator/api_keys.py", "if hmac.compare_digest(digest, known)]", "if digest == known]", T_KEYS),
    Fault(
        "baton/core/blocks.py",
        "(model_digest, tenant, salt, adapter)",
        "(model_digest, salt, adapter)",
        "tests/core/test_prefix_cache.py",
    ),
    Fault(
        "baton/core/blocks.py",
        "(model_digest, tenant, salt, adapter)",
        "(model_digest, tenant, salt)",
        "tests/core/test_prefix_cache.py",
    ),
    Fault(
        "baton/core/prefix_cache.py",
        "request.tenant, request.cache_salt",
        '"", request.cache_salt',
        "tests/cluster/test_secured.py",
    ),
    Fault(
        "baton/runtime/status.py",
        "if row(error).hide or not isinstance(error, BatonError):",
        "if False:",
        "tests/runtime/test_status.py tests/coordinator/test_http.py",
    ),
    Fault(
        "coordinator/http/guard.py",
        "        except ValueError:\n            return False\n",
        "        except ValueError:\n            pass\n",
        "tests/coordinator/test_cors.py",
    ),
    Fault(
        "baton/models/model_config.py",
        '    if "auto_map" in config:',
        "    if False:",
        "tests/engine/test_model_config.py",
    ),
    Fault(
        "coordinator/http/app.py",
        "        return self._pipeline.adapters.chosen(name, self._settings.model_name)\n",
        "        try:  # S-18\n            open(name)\n        except (OSError, ValueError):\n            pass\n        return self._pipeline.adapters.chosen(name, self._settings.model_name)\n",
        T_SECURITY,
    ),
    Fault(
        "baton/core/blocks.py",
        "hashlib.blake2b(before + packed",
        "hashlib.blake2b(packed",
        "tests/core/test_prefix_cache.py",
    ),
    Fault("baton/runtime/health.py", "options=_OPTIONS", "", "tests/runtime/test_health.py"),
    # The request lifecycle.
    Fault(LOSSES, "len(choice.deaths) >= self._max_deaths:", "len(choice.deaths) > self._max_deaths:", T_REQUESTS),
    Fault(LOSSES, "(choice.name == loss.alone if choice.alone else loss.alone is None)", "True", T_REQUESTS),
    Fault(
        "decode/scheduler.py",
        "groups = [together, *alone] if",
        "groups = [running] if",
        "tests/decode/test_scheduler.py",
    ),
    Fault(LOSSES, "if ran and not loss.drained and", "if ran and", T_REQUESTS),
    Fault(REQUESTS, "ran=choice.stage is PREFILL", "ran=True", T_REQUESTS),
    Fault(CHOICE, "        self.earlier_speculation = self.speculation\n", "", T_REQUESTS),
    Fault(CHOICE, "        self.earlier_stamps.append(self.stamps)\n", "", T_REQUESTS),
    Fault(
        "batches/store.py",
        " and status is null order by",
        " order by",
        T_BATCHES,
    ),
    Fault(
        "batches/store.py",
        'where id = ? and owner = ?", (file_id, owner)',
        'where id = ?", (file_id,)',
        T_BATCHES,
    ),
    Fault("batches/runner.py", "if answer.status not in RETRIED or", "if True or", T_BATCHES),
    Fault("baton/runtime/tls.py", ", require_client_auth=True)", ")", T_TLS),
    Fault("baton/runtime/tls.py", "if tls is not None and role not in expected:", "if False:", T_TLS),
    Fault("baton/runtime/tls.py", "peer_role + DOMAIN)]", '"prefill" + DOMAIN)]', T_TLS),
    Fault("coordinator/control.py", '("operator",), command)', '("operator", "decode"), command)', T_TLS),
    Fault("coordinator/policy/quotas.py", "        account.running -= choices\n", "", T_QUOTAS),
    Fault("coordinator/policy/quotas.py", ", self.rate * MINUTE_S)", ", 1e9)", T_QUOTAS),
    Fault(
        FAIR_QUEUE,
        "for priority in sorted(self._levels)",
        "for priority in list(self._levels)",
        T_DISPATCH,
    ),
    Fault("coordinator/submission.py", "max(self.priority, client.priority)", "self.priority", T_KEYS),
    Fault(TIMELINE, "stamps[run]", "stamps[0]", T_TIMELINE),
    Fault(TIMELINE, 'yield "detokenise", whole', "return", T_TIMELINE),
    Fault(CHOICE, "            self.add_stamps(event.stamps)\n", "            pass\n", T_REQUESTS),
    Fault(
        REQUESTS, "choice.queued_s += now - choice.queued_at", "choice.queued_s = now - choice.queued_at", T_REQUESTS
    ),
    Fault(CHOICE, "len(self.tokens) - len(self.request.output)", "len(self.tokens)", T_REQUESTS),
    Fault(
        CHOICE,
        "event.cached_tokens and not request.output:",
        "event.cached_tokens:",
        T_REQUESTS,
    ),
    Fault(
        REQUESTS,
        "return [] if choice.kv_parked else self._park(choice, event, now)",
        "return self._park(choice, event, now)",
        T_REQUESTS,
    ),
    Fault(REQUESTS, "if choice.times_parked == 1:", "if True:", T_REQUESTS),
    Fault(
        REQUESTS,
        "        if not self.workers.connected(choice.prefill_worker):\n            return []\n",
        "",
        T_REQUESTS,
    ),
    Fault(REQUESTS, "and targets_unchanged:", "and True:", T_REQUESTS),
    Fault(
        REQUESTS,
        "code in (ErrorCode.KV_CORRUPT, ErrorCode.HANDOFF_FAILED) and not choice.recomputed:",
        "code in (ErrorCode.KV_CORRUPT, ErrorCode.HANDOFF_FAILED):",
        T_REQUESTS,
    ),
    Fault(REQUESTS, "(ErrorCode.DRAINING, ErrorCode.ABANDONED) or", "(ErrorCode.DRAINING,) or", T_REQUESTS),
    Fault(REQUESTS, "if unknown and here and", "if here and", T_REQUESTS),
    Fault(REQUESTS, "len(names) - len(started)", "len(names)", T_REQUESTS),
    Fault(
        "baton/runtime/codec.py",
        "_CODE_OF.get(number, ErrorCode.INTERNAL_ERROR)",
        "_CODE_OF[number]",
        "tests/runtime/test_codec.py",
    ),
    Fault(
        REQUESTS,
        "        if choice.kv_parked and choice.finish is None:\n            return self._reschedule(choice, _LOST_ACK, now)\n",
        "",
        T_REQUESTS,
    ),
    Fault(REQUESTS, "self.workers.incarnation(worker) != taker", "False", T_REQUESTS),
    Fault(
        REQUESTS,
        "        self.holding.update(self._waiting.values(), now)\n        if now >= self._no_deadline_before:",
        "        if now >= self._no_deadline_before:",
        T_REQUESTS,
    ),
    Fault(REQUESTS, "self._age if first is None else first.age", "self._age", T_REQUESTS),
    Fault(REQUESTS, "Fail(choice.late()), now)", "Placed(), now) if False else []", T_REQUESTS),
    # Placement.
    Fault(
        "baton/core/virtual_counters.py",
        "return max(self.of(tenant), floor - IDLE_CREDIT)",
        "return self.of(tenant)",
        T_FAIR_QUEUE,
    ),
    Fault("baton/core/virtual_counters.py", "if self._since[tenant] > BURST:", "if False:", T_FAIR_QUEUE),
    Fault(FAIR_QUEUE, ", by_age=True", "", T_FAIR_QUEUE),
    Fault(DISPATCH, "        if many or long:\n", "        if False:\n", T_FAIR_QUEUE),
    Fault(
        DISPATCH,
        "        self.check_deadline(*urgency, choice.deadline_at - choice.started_at, choices)\n",
        "",
        T_FAIR_QUEUE,
    ),
    Fault(FAIR_QUEUE, "_RESUMED if choice.prompt_charged else", "", T_FAIR_QUEUE),
    Fault(
        FAIR_QUEUE,
        "choice.queue_position = (choice.request.priority, choice.age, self._submitted)",
        "choice.queue_position = (choice.request.priority, 0, self._submitted)",
        T_DISPATCH,
    ),
    Fault(
        DISPATCH,
        "            if self._too_small(choice, each) is None:\n",
        "            if True:\n",
        T_DISPATCH,
    ),
    Fault(
        POOL,
        "or self.before(tenant, tokens) + tokens <= limit:",
        "or self.backlog_tokens + tokens <= limit:",
        T_OVERTAKING,
    ),
    Fault(POOL, "long and self.backlog_tokens <= limit and tenant not in self.backlog_of", "False", T_OVERTAKING),
    Fault(OVERTAKING, " and counter < self.below", "", T_OVERTAKING),
    Fault(OVERTAKING, "min(self.below, below)", "-inf", T_OVERTAKING),
    Fault(OVERTAKING, "mine.priority == self.priority and ", "", T_OVERTAKING),
    Fault(DISPATCH, "if choice.prompt_charged or not computes or", "if", T_OVERTAKING),
    Fault(DISPATCH, " or known.open", "", T_OVERTAKING),
    Fault(DISPATCH, " or len(known.lacks) > 1", "", T_OVERTAKING),
    Fault(
        "coordinator/policy/quotas.py",
        " and self._seconds >= WINDOW_S / 2",
        "",
        "tests/coordinator/test_policy_drain_rate.py",
    ),
    Fault(DISPATCH, "blocks = 0 if stage is Stage.DECODE else ", "blocks = ", T_DISPATCH),
    Fault(PICK, " or worker.rank >= much_fuller", "", T_DISPATCH),
    Fault(POOL, "        return holders[::-1]\n", "        return holders\n", T_PICK),
    Fault(
        POOL,
        "            self.pool.grown = True\n        self.room = room",
        "            pass\n        self.room = room",
        T_DISPATCH,
    ),
    Fault(FAIR_QUEUE, "self.tokens += tokens", "self.tokens += abs(tokens)", T_DISPATCH),
    # Classes.
    Fault(DISPATCH, "continues(before, facts) is None]", "True]", T_CLASSES),
    Fault(DISPATCH, "if all(map(Pool.capacity, self._pools(choice, each)))]", "if each.workers]", T_CLASSES),
    Fault(DISPATCH, "return min(sides), max(sides)", "return max(sides), min(sides)", T_CLASSES),
    # Where prompts are computed.
    Fault(
        PICK,
        " if w.accepts_prompt(tenant, count))",
        ")",
        T_SPLIT,
    ),
    Fault(POLICY_SPLIT, "streams * _felt_s(waits_s, stream_s)", "0.0", T_SPLIT),
    Fault(POLICY_SPLIT, "more * _felt_s(waits_s / 2, stream_s)", "0.0", T_SPLIT),
    Fault(POLICY_SPLIT, "100 * waits_s / (waits_s + stream_s) * waits_s if waits_s else 0.0", "10 * waits_s", T_SPLIT),
    Fault(D_SCHEDULER, "if streams else model.step_tokens", "if running > long else model.step_tokens", T_PROMPTS),
    Fault(D_SCHEDULER, "                self._turns.computes(sequence, of_prompt)\n", "", T_PROMPTS),
    Fault(LONG_ROWS, "self._counters.turn(lane[1]), ", "", "tests/core/test_long_rows.py"),
    Fault(D_SCHEDULER, "if blocked or self._shares_with_running(sequence):", "if blocked:", T_PROMPTS),
    # Workers.
    Fault(
        WORKERS,
        "worker.incarnation != incarnation or worker.lease_until <= now:\n            return False\n        worker.lease",
        "worker.incarnation != incarnation:\n            return False\n        worker.lease",
        T_WORKERS,
    ),
    Fault(WORKERS, "if known is not None and known.incarnation > join.incarnation:", "if False:", T_WORKERS),
    Fault(
        MEMBERSHIP,
        "(DRAINING, Redialled): to(Member._redialled)",
        "(DRAINING, Redialled): to(Member._ready_again, READY)",
        T_WORKERS,
    ),
    Fault(MEMBERSHIP, "min(self.lease_until, now + REDIAL_S)", "self.lease_until", T_WORKERS),
    Fault(
        WORKERS, "            self._left[worker_id] = incarnation\n", "", "tests/coordinator/test_cluster_membership.py"
    ),
    Fault(POOL, "room = 0 if load.preempted else", "room =", T_DISPATCH),
    # Tokens.
    Fault("coordinator/policy/choice.py", "if known is not None and known != token:", "if False:", T_JOURNAL),
    Fault(CHOICE, "        self.ahead.clear()\n        self.kv_parked", "        self.kv_parked", T_JOURNAL),
    Fault(
        "baton/core/output_log.py",
        "start = max(item.next_index, first)",
        "start = first",
        "tests/core/test_output_log.py",
    ),
    Fault(
        "baton/core/request.py",
        "if (output_len > request.sampling.min_tokens or",
        "if (output_len >= request.sampling.min_tokens or",
        "tests/core tests/coordinator/test_policy_journal.py",
    ),
    # KV blocks and handles.
    Fault(
        "baton/core/blocks.py", 'if holder.kind == "receiving" or _being_received(holders):', "if False:", "tests/core"
    ),
    Fault(
        "baton/core/blocks.py", "        if self._num_held:\n", "        if False:\n", "tests/core/test_idle_check.py"
    ),
    Fault("baton/core/blocks.py", "        self._count(old, -len(blocks))\n", "", "tests/core/test_blocks_machine.py"),
    Fault(
        "baton/runtime/worker_loop.py",
        "                self._tier.scheduler.check_idle()  # a leak is a failure",
        "                pass",
        "tests/runtime/test_worker_loop.py",
    ),
    Fault("baton/core/handover.py", "if now_ms >= handle.expires_ms:", "if False:", "tests/core/test_handles.py"),
    Fault(
        "baton/core/handover.py",
        "        self._until[handle.signature] = handle.expires_ms\n",
        "",
        "tests/core/test_handles.py",
    ),
    Fault(
        "coordinator/serving.py",
        '() if routes == "admin" else parse_origins(',
        "_origins(",
        "tests/cluster/test_secured.py",
    ),
    Fault(
        "coordinator/grpc/service.py",
        '            ("grpc.max_allowed_incoming_connections", round(connection_limit(0) * GRPC)),\n',
        "",
        "tests/coordinator/test_grpc_refused.py",
    ),
    Fault(
        "baton/runtime/tls.py",
        "    certificates.check_usages(chain[0], certificates.USAGES[role], own, flag)\n",
        "",
        T_TLS,
    ),
    Fault(
        "baton/runtime/certificates.py",
        "        if is_authority(candidate):\n            return",
        "        if True:\n            return",
        T_TLS,
    ),
    # The schedulers.
    Fault(
        "prefill/scheduler.py",
        "                room = room and self._start(sequence, now)",
        "                room = self._start(sequence, now)",
        "tests/prefill/test_scheduler.py tests/prefill/test_scheduler_machine.py",
    ),
    Fault(
        "prefill/scheduler.py",
        "leave=self._promised(), max_columns=self._max_columns",
        "leave=0, max_columns=self._max_columns",
        "tests/prefill/test_window_machine.py",
    ),
    Fault(
        "baton/core/prefix_cache.py",
        "max_columns - max(matched - dropped, 0) if idle else max_columns)",
        "max_columns - max(matched - dropped, 0))",
        "tests/prefill/test_window_machine.py",
    ),
    Fault(
        "baton/core/prefix_cache.py",
        "        if sequence.step_id is None:\n            self.blocks.release(sequence.retired, holder)",
        "        if True:\n            self.blocks.release(sequence.retired, holder)",
        "tests/core/test_window.py",
    ),
    Fault(
        "decode/scheduler.py",
        "if waiting or not self.cache.allocate(sequence, *holders, leave=leave, start=start):",
        "if not self.cache.allocate(sequence, *holders, leave=leave, start=start):",
        "tests/decode/test_scheduler.py tests/decode/test_scheduler_machine.py tests/decode/test_preemption.py",
    ),
    Fault(
        "prefill/scheduler.py",
        "            reason = sequence.append(token, logprob)",
        "            reason = sequence.append(token)",
        "tests/prefill/test_scheduler.py",
    ),
    Fault(
        "prefill/scheduler.py",
        "            self.blocks.convert(blocks, Holder(kind, old), Holder(kind, sequence.id))",
        "            pass",
        "tests/prefill/test_scheduler.py",
    ),
    Fault(
        "baton/core/deadlines.py",
        "            self.add(new, at)\n",
        "            pass\n",
        "tests/core/test_deadlines.py",
    ),
    # The two ends of a hand-over.
    Fault(
        "prefill/handover.py",
        "*(self._park() if self.state is SendStage.SENDING else self._offer_next(None, now))",
        "*self._offer_next(None, now)",
        "tests/prefill/test_handover.py",
    ),
    Fault(
        "prefill/handover.py",
        "            if self.sends > 1:\n",
        "            if False:\n",
        "tests/prefill/test_handover.py",
    ),
    Fault(
        "decode/handover.py",
        "            if self.writing:\n                return []\n        return [Reply(peer, Abort",
        "        return [Reply(peer, Abort",
        "tests/decode/test_handover.py",
    ),
    Fault(
        "decode/handover.py",
        "        if peer is not self.peer or not event.edge_open:\n",
        "        if not event.edge_open:\n",
        "tests/decode/test_handover.py",
    ),
    Fault(
        "decode/handover.py",
        "        if self._sequence.ending is None:\n",
        "        if True:\n",
        "tests/decode/test_handover.py",
    ),
    # Grammars and tools.
    Fault(
        "decode/scheduler.py",
        "                sequence.num_computed = row.end - row.num_sampled\n                if (failed",
        "                sequence.num_computed = row.end\n                if (failed",
        "tests/decode/test_scheduler.py",
    ),
    Fault(
        "prefill/scheduler.py",
        "sequence.num_computed = row.end - unsampled",
        "sequence.num_computed = row.end",
        "tests/prefill/test_scheduler.py",
    ),
    Fault("baton/core/request.py", " or request.sampling.grammar)", ")", T_GRAMMARS),
    Fault(
        "baton/engine/grammar_automaton.py",
        "            if matcher.try_consume_tokens([token]) != 1:\n                break\n",
        "            matcher.try_consume_tokens([token])\n",
        T_GRAMMARS,
    ),
    Fault(
        "baton/engine/grammar_automaton.py",
        "        if len(masks) > 1:\n            matcher.rollback(len(masks) - 1)\n",
        "",
        T_GRAMMARS,
    ),
    Fault("baton/engine/grammars.py", "0.0 if followed.late and not self._all_late else ", "", T_GRAMMARS),
    Fault("baton/runtime/grammar_process.py", "signal.ITIMER_PROF, request.cpu_s", "signal.ITIMER_PROF, 90.0", T_MASKS),
    Fault("baton/engine/mask_processes.py", "            automaton.place = None\n", "", T_GRAMMARS),
    Fault("baton/engine/grammar_automaton.py", "or known[0] == full", "", T_GRAMMARS),
    Fault("baton/engine/mask_processes.py", "                    self._start_thread()\n", "", T_MASKS),
    Fault("baton/engine/mask_queue.py", "len(turns) < MAX_RUNNING", "True", "tests/engine/test_mask_queue.py"),
    Fault(REQUESTS, " and now >= choice.offer_at:", ":", T_REQUESTS),
    Fault(QUEUE, "key=self._used_s.__getitem__", "key=lambda c: 0", T_QUEUE),
    Fault(QUEUE, "if c not in self._running", "if True", T_QUEUE),
    Fault(QUEUE, "max(self._used_s.get(client, 0.0), self._level_s)", "self._used_s.get(client, 0.0)", T_QUEUE),
    Fault(QUEUE, "        self._used_s[client] += took_s\n", "", T_QUEUE),
    Fault("coordinator/pipeline.py", "(constraint, submission.client.key)", '(constraint, "")', T_PIPELINE),
    Fault(
        "coordinator/structured_output.py",
        "and self._queue.leave(client, constraint)",
        "and False",
        "tests/coordinator/test_structured_output.py",
    ),
    Fault(
        "coordinator/structured_output.py",
        "        self._keep(constraint, verdict)\n",
        "",
        "tests/coordinator/test_structured_output.py",
    ),
    Fault(
        "coordinator/text/object_calls.py",
        'self._up_to("</tool_call>", "<tool_call>")',
        'self._up_to("</tool_call>")',
        "tests/coordinator/test_tool_calls.py",
    ),
    Fault(
        "decode/speculation/step_cost.py",
        "                expected += self._switching_s * self.short.scale\n",
        "                pass\n",
        "tests/decode/test_step_cost.py",
    ),
    Fault(
        "baton/runtime/session.py",
        "await asyncio.sleep(interval_s * random.uniform(0.5, 1.0))",
        "await asyncio.sleep(interval_s)",
        "tests/runtime/test_session.py",
    ),
    # What must be equal between members.
    Fault(
        "baton/core/compatibility.py",
        "(not one_worker and _may_differ(name, mine, other))",
        "_may_differ(name, mine, other)",
        "tests/engine/test_rank_options.py",
    ),
    Fault(
        "decode/worker.py",
        " or difference(self.facts, hello.facts)\n",
        "\n",
        "tests/decode/test_links_refused.py",
    ),
    Fault(
        "prefill/link.py",
        "if (differs := difference(hello.facts, welcome.facts)) is not None:",
        "if (differs := None) is not None:",
        "tests/decode/test_links_refused.py",
    ),
    Fault(
        "coordinator/policy/joining.py",
        "if (differs := difference(theirs, join.facts)) is not None:",
        "if (differs := None) is not None:",
        T_WORKERS,
    ),
    # Processes of the launcher.
    Fault(
        "launch/child.py",
        "elif self._last_heartbeat_at is not None and listened",
        "elif False and listened",
        "tests/launch/test_agent.py",
    ),
    Fault("launch/supervisor.py", "if now - failed_at >= KILL_DELAY_S:", "if False:", "tests/launch/test_agent.py"),
    Fault(
        "launch/doctor/sessions.py",
        "if self._sent is not None and self._decoded and",
        "if self._sent is not None and",
        "tests/launch/test_doctor.py",
    ),
    # Pooling.
    Fault("baton/core/request.py", ' or self.pooling == "mean"', "", "tests/prefill/test_scheduler.py"),
    Fault(
        "baton/core/sequence.py",
        'self.num_tokens if self.request.pooling == "mean" else 1',
        "1",
        "tests/prefill/test_scheduler.py",
    ),
    Fault("baton/engine/outputs.py", ".mul_(SCALE).round_()", ".mul_(SCALE)", "tests/engine/test_pooling.py"),
    Fault(DISPATCH, "each.pools[: 1 + choice.needs_decode] if apart", "each.pools if apart", T_REQUESTS),
    Fault("coordinator/pipeline.py", "min(len(submissions), AT_ONCE))]", "len(submissions))]", T_POOLING),
)
