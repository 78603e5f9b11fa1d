-- The census: what broke, how often, what ended it, and what it cost. Tables are filled by infra/census.py (from a recording or a
-- running bus) or by an archive of the same shape; the views below are the same over each.
--
-- Times end in _ns (whole nanoseconds since 1970, by the broker's clock) or _s (seconds, a duration). What is not known is NULL,
-- never 0. An event is believed from its own role only: a `decision_made` that a detector wrote is no decision.

CREATE TABLE events (
    stream VARCHAR NOT NULL,
    sequence BIGINT NOT NULL,
    time_ns BIGINT NOT NULL,          -- when the broker stored it
    subject VARCHAR NOT NULL,
    role VARCHAR NOT NULL,            -- operator, detector, decider, actuator, timer; '' in telemetry
    kind VARCHAR NOT NULL,            -- signal, decision_made, ...
    type VARCHAR NOT NULL,            -- keepstep.signal.v1, ...
    id VARCHAR NOT NULL,
    source VARCHAR NOT NULL,
    event_time_ns BIGINT NOT NULL,    -- when it was seen, or the time of the input that it was derived from
    causes VARCHAR[] NOT NULL,
    job VARCHAR NOT NULL,             -- of the subject; '' for the whole fleet
    attempt BIGINT NOT NULL,
    data JSON NOT NULL                -- with defaults; non-finite numbers as 'NaN', 'Infinity', '-Infinity'
);

-- Records that could not be read, or came twice: counted, never dropped silently.
CREATE TABLE problems (stream VARCHAR, sequence BIGINT, subject VARCHAR, what VARCHAR, reason VARCHAR);

-- Every symptom there is and its category: explicit, implicit, manual.
CREATE TABLE symptoms (symptom VARCHAR PRIMARY KEY, category VARCHAR NOT NULL);

-- Seconds of each job by what they were spent on; each second is in exactly one bin.
CREATE TABLE wall_bins (job VARCHAR NOT NULL, bin VARCHAR NOT NULL, seconds DOUBLE NOT NULL);

-- LEDGER with each event once: one that was published twice (after a takeover, say) has the same id.
CREATE VIEW ledger AS
SELECT * FROM events WHERE stream = 'LEDGER' QUALIFY row_number() OVER (PARTITION BY role, id ORDER BY sequence) = 1;

CREATE VIEW signals AS
SELECT sequence, time_ns, job, attempt, id,
       data->>'symptom' AS symptom, data->>'node' AS node, (data->>'rank')::BIGINT AS rank, data->>'device' AS device,
       data->>'confidence' AS confidence, data->>'rule' AS rule, data->>'evidence' AS evidence,
       (data->>'seen_ns')::BIGINT AS seen_ns, (data->>'count')::BIGINT AS observations,
       (time_ns - (data->>'seen_ns')::BIGINT) / 1e9 AS age_s
FROM ledger WHERE role = 'detector' AND kind = 'signal' ORDER BY sequence;

-- `decided_ns` is when the decision was durable.
CREATE VIEW decisions AS
SELECT sequence, time_ns AS decided_ns, job, data->>'decision' AS decision, data->>'incident' AS incident,
       (data->>'epoch')::BIGINT AS epoch, (data->>'ordinal')::BIGINT AS ordinal, data->>'rung' AS rung, data->>'rule' AS rule,
       data->>'mode' AS mode, data->>'vetoed' AS vetoed, (data->>'mode') <> 'observe' AND (data->>'vetoed') = '' AS acts,
       (data->'nodes')::VARCHAR[] AS nodes, data->>'because' AS because, data->>'policy_digest' AS policy_digest,
       data->>'code_version' AS code_version, id
FROM ledger WHERE role = 'decider' AND kind = 'decision_made' ORDER BY sequence;

-- What actuators were told, how often they tried, and what came of it (result NULL: nothing yet).
CREATE VIEW actions AS
WITH intents AS (
    SELECT data->>'key' AS key, any_value(job) AS job, min(time_ns) AS intended_ns,
           arg_min(data->>'incident', sequence) AS incident, arg_min(data->>'decision', sequence) AS decision,
           arg_min(data->>'verb', sequence) AS verb, arg_min(data->>'node', sequence) AS node,
           arg_min((data->>'attempt')::BIGINT, sequence) AS attempt
    FROM ledger WHERE role = 'decider' AND kind = 'intent_issued' GROUP BY key
), tries AS (
    SELECT data->>'key' AS key, count(*) AS tries
    FROM ledger WHERE role = 'actuator' AND kind = 'try_started' GROUP BY key
), outcomes AS (
    SELECT data->>'key' AS key, min(time_ns) AS ended_ns, arg_min(data->>'result', sequence) AS result,
           arg_min(data->>'detail', sequence) AS detail
    FROM ledger WHERE role = 'actuator' AND kind = 'outcome_recorded' GROUP BY key
)
SELECT i.key, i.job, i.incident, i.decision, i.verb, i.node, i.attempt, i.intended_ns, coalesce(t.tries, 0) AS tries,
       o.result, o.detail, o.ended_ns, (o.ended_ns - i.intended_ns) / 1e9 AS took_s
FROM intents i LEFT JOIN tries t USING (key) LEFT JOIN outcomes o USING (key) ORDER BY i.intended_ns, i.key;

CREATE VIEW evictions AS
SELECT job, node, incident, decision, intended_ns, ended_ns, tries, coalesce(result, 'pending') AS result, detail
FROM actions WHERE verb = 'evict_node' ORDER BY intended_ns, node;

-- One row an incident. A planned restart or stop is no incident of the decider's, but the census counts it, as manual (a stop that
-- a restart follows is one with it). `outcome` open: not closed yet. `detect_s`: first evidence to opened; `decide_s`: opened to the
-- last decision (in mode observe: what it would have done); `mechanism` of an open one: what was last acted on. `recover_s`: that decision to the first confirmed healthy step; `back_s`: first evidence to that step.
CREATE VIEW incidents AS
WITH opened AS (
    SELECT data->>'incident' AS incident, any_value(job) AS job, min(time_ns) AS opened_ns,
           arg_min((data->>'epoch')::BIGINT, sequence) AS epoch, arg_min(data->>'symptom', sequence) AS symptom,
           arg_min((data->>'first_evidence_ns')::BIGINT, sequence) AS first_evidence_ns
    FROM ledger WHERE role = 'decider' AND kind = 'incident_opened' GROUP BY incident
), closed AS (
    SELECT data->>'incident' AS incident, min(time_ns) AS closed_ns, arg_min(data->>'symptom', sequence) AS symptom,
           arg_min(data->>'mechanism', sequence) AS mechanism, arg_min(data->>'outcome', sequence) AS outcome,
           arg_min((data->'nodes')::VARCHAR[], sequence) AS nodes, arg_min((data->>'back_ns')::BIGINT, sequence) AS back_ns,
           arg_min((data->>'step_before')::BIGINT, sequence) AS step_before,
           arg_min((data->>'step_restored')::BIGINT, sequence) AS step_restored
    FROM ledger WHERE role = 'decider' AND kind = 'incident_closed' GROUP BY incident
), last_decision AS (
    SELECT incident, max(decided_ns) AS decided_ns, arg_max(rung, sequence) FILTER (acts) AS rung
    FROM decisions WHERE incident <> '' AND rung NOT IN ('wait', 'none') AND rule <> 'examine_evicted' GROUP BY incident
), troubles AS (
    SELECT o.job, o.epoch, o.incident, coalesce(c.symptom, o.symptom) AS symptom,
           coalesce(c.mechanism, d.rung) AS mechanism, coalesce(c.outcome, 'open') AS outcome,
           o.first_evidence_ns, o.opened_ns, d.decided_ns, nullif(c.back_ns, 0) AS back_ns, c.closed_ns,
           -- A restore beyond the last step that the ledger was told of (it is told every so often): how many were lost is not known.
           CASE WHEN c.outcome = 'recovered' AND c.step_before >= c.step_restored AND c.step_before >= 0
               THEN c.step_before - c.step_restored END AS steps_lost,
           coalesce(c.nodes, []) AS nodes
    FROM opened o LEFT JOIN closed c USING (incident) LEFT JOIN last_decision d USING (incident)
), requests AS (
    SELECT sequence, time_ns, job, id, kind, coalesce(data->>'symptom', 'operator_restart') AS symptom,
           lag(kind) OVER w AS kind_before, lag(time_ns) OVER w AS time_before, lead(kind) OVER w AS kind_after
    FROM ledger WHERE role = 'operator' AND kind IN ('restart_requested', 'stop_requested')
    WINDOW w AS (PARTITION BY job ORDER BY sequence)
), planned AS (
    SELECT r.job, NULL::BIGINT AS epoch, r.id AS incident, r.symptom, 'planned' AS mechanism,
           r.kind AS request, r.sequence,
           CASE WHEN r.kind_before = 'stop_requested' THEN r.time_before ELSE r.time_ns END AS first_evidence_ns,
           r.time_ns AS opened_ns
    FROM requests r
    WHERE NOT (r.kind = 'stop_requested' AND coalesce(r.kind_after, '') = 'restart_requested')
), progress AS (
    SELECT sequence, time_ns, job, (data->>'step')::BIGINT AS step, (data->>'first')::BOOLEAN AS first,
           (data->>'restored_step')::BIGINT AS restored_step
    FROM ledger WHERE role = 'detector' AND kind = 'progress_noted'
), manual AS (
    SELECT p.job, p.epoch, p.incident, p.symptom, p.mechanism,
           CASE WHEN p.request = 'stop_requested' THEN 'stopped' WHEN back.time_ns IS NULL THEN 'open' ELSE 'recovered' END AS outcome,
           p.first_evidence_ns, p.opened_ns, decided.decided_ns,
           CASE WHEN p.request = 'restart_requested' THEN back.time_ns END AS back_ns,
           CASE WHEN p.request = 'restart_requested' THEN back.time_ns END AS closed_ns,
           CASE WHEN p.request = 'restart_requested' AND before.step >= back.restored_step
               THEN before.step - back.restored_step END AS steps_lost,
           []::VARCHAR[] AS nodes
    FROM planned p
    LEFT JOIN LATERAL (SELECT min(d.decided_ns) AS decided_ns FROM decisions d
                       WHERE d.job = p.job AND d.rung = 'planned' AND d.sequence > p.sequence) decided ON true
    LEFT JOIN LATERAL (SELECT min(g.time_ns) AS time_ns, arg_min(g.restored_step, g.sequence) AS restored_step FROM progress g
                       WHERE g.job = p.job AND g.first AND g.sequence > p.sequence) back ON true
    LEFT JOIN LATERAL (SELECT arg_max(g.step, g.sequence) AS step FROM progress g
                       WHERE g.job = p.job AND g.time_ns <= p.first_evidence_ns) before ON true
), every AS (
    SELECT * FROM troubles UNION ALL SELECT * FROM manual
)
SELECT e.job, e.epoch, e.incident, e.symptom, coalesce(s.category, 'explicit') AS category, e.mechanism, e.outcome,
       e.first_evidence_ns, e.opened_ns, e.decided_ns, e.back_ns, e.closed_ns,
       CASE WHEN e.epoch IS NOT NULL THEN (e.opened_ns - e.first_evidence_ns) / 1e9 END AS detect_s,
       (e.decided_ns - e.opened_ns) / 1e9 AS decide_s,
       (e.back_ns - e.decided_ns) / 1e9 AS recover_s,
       (e.back_ns - e.first_evidence_ns) / 1e9 AS back_s,
       e.steps_lost, e.nodes
FROM every e LEFT JOIN symptoms s USING (symptom)
ORDER BY e.opened_ns, e.job, e.incident;

CREATE VIEW census_by_symptom AS
SELECT category, symptom, count(*) AS incidents, count(*) / sum(count(*)) OVER () AS share
FROM incidents GROUP BY category, symptom ORDER BY incidents DESC, symptom;

CREATE VIEW census_by_category AS
SELECT category, count(*) AS incidents, count(*) / sum(count(*)) OVER () AS share
FROM incidents GROUP BY category ORDER BY incidents DESC, category;

CREATE VIEW mechanism_by_symptom AS
SELECT coalesce(mechanism, 'none') AS mechanism, category, symptom, count(*) AS incidents,
       count(*) / sum(count(*)) OVER () AS share, sum(steps_lost)::BIGINT AS steps_lost
FROM incidents GROUP BY ALL ORDER BY incidents DESC, mechanism, symptom;

-- Machines that were evicted, and what their examination off the critical path came to: confirmed, exonerated, unproven; 'not judged' while
-- none did. An exonerated one was a false positive.
CREATE VIEW machines AS
WITH evicted AS (
    SELECT i.job, data->>'node' AS node, data->>'incident' AS incident, i.sequence, i.time_ns AS evicted_ns,
           coalesce(d.rule, '') AS rule
    FROM ledger i LEFT JOIN decisions d ON d.decision = i.data->>'decision'
    WHERE i.role = 'decider' AND i.kind = 'intent_issued' AND data->>'verb' = 'evict_node'
), judged AS (
    SELECT job, data->>'node' AS node, sequence, time_ns AS judged_ns, data->>'verdict' AS verdict, (data->>'back')::BOOLEAN AS back,
           data->>'because' AS because
    FROM ledger WHERE role = 'decider' AND kind = 'machine_judged'
)
SELECT e.job, e.node, e.incident, e.rule, e.evicted_ns, j.judged_ns, coalesce(j.verdict, 'not judged') AS verdict,
       coalesce(j.back, false) AS back, j.because
FROM (SELECT *, lead(sequence) OVER (PARTITION BY job, node ORDER BY sequence) AS again FROM evicted) e
LEFT JOIN judged j ON j.job = e.job AND j.node = e.node AND j.sequence > e.sequence AND (e.again IS NULL OR j.sequence < e.again)
QUALIFY row_number() OVER (PARTITION BY e.job, e.node, e.sequence ORDER BY j.sequence) = 1;

-- How often the machines that a rule evicted were found bad, and how often not.
CREATE VIEW evictions_by_rule AS
SELECT rule, verdict, count(*) AS machines, count(*) / sum(count(*)) OVER (PARTITION BY rule) AS share
FROM machines GROUP BY rule, verdict ORDER BY rule, machines DESC, verdict;

-- How long it took, for each symptom and for `all` together: to detect, to decide, to recover, and to be back at work (the whole).
-- `incidents`: those that have such a time.
CREATE VIEW resolution_times AS
WITH times AS (
    SELECT symptom, unnest([
        {'place': 1, 'time': 'detect', 'seconds': detect_s}, {'place': 2, 'time': 'decide', 'seconds': decide_s},
        {'place': 3, 'time': 'recover', 'seconds': recover_s}, {'place': 4, 'time': 'back', 'seconds': back_s}
    ], recursive := true)
    FROM incidents
)
SELECT coalesce(symptom, 'all') AS symptom, time, count(seconds) AS incidents, quantile_cont(seconds, 0.5) AS median_s,
       quantile_cont(seconds, 0.99) AS p99_s, max(seconds) AS max_s
FROM times GROUP BY GROUPING SETS ((symptom, place, time), (place, time)) HAVING count(seconds) > 0
ORDER BY grouping(symptom) DESC, symptom, place;

CREATE VIEW wall_time AS
SELECT job, bin, seconds, seconds / nullif(sum(seconds) OVER (PARTITION BY job), 0) AS share
FROM wall_bins ORDER BY job, seconds DESC, bin;

-- Effective training time ratio: productive time over wall time. Recomputed steps are not productive.
CREATE VIEW ettr AS
SELECT job, sum(seconds) AS wall_s, coalesce(sum(seconds) FILTER (bin = 'productive'), 0) AS productive_s,
       coalesce(sum(seconds) FILTER (bin = 'productive'), 0) / nullif(sum(seconds), 0) AS ettr
FROM wall_bins GROUP BY job ORDER BY job;

-- ByteRobust's Table 1 (arXiv 2509.16293: 55,365 incidents of 778,135 jobs in three months), to lay beside one's own.
CREATE VIEW beside_byterobust AS
WITH paper(name, symptoms, count) AS (VALUES
    ('CUDA error', ['cuda_error'], 19968), ('CPU overload', ['cpu_overload'], 6095), ('CPU (host) OOM', ['host_oom'], 5567),
    ('insufficient disk space', ['disk_space'], 2755), ('InfiniBand error', ['ib_error', 'nic_down', 'nic_flap', 'switch_down'], 1599),
    ('filesystem mount', ['fs_mount'], 1176), ('HDFS error', ['storage_error'], 1104), ('container error', ['container_error'], 781),
    ('OS kernel panic', ['os_kernel_panic'], 203), ('GPU memory error', ['gpu_memory_error'], 188),
    ('external service error', ['external_service'], 128), ('GPU unavailable', ['gpu_unavailable', 'gpu_driver_hang'], 76),
    ('disk fault', ['disk_fault'], 47), ('job hang', ['job_hang'], 5506), ('MFU decline', ['mfu_decline'], 442),
    ('NaN value', ['nan_value'], 148), ('code/data adjustment', ['code_update', 'data_update', 'operator_restart'], 9582)
)
SELECT p.name, p.count / 55365 AS paper_share, count(i.symptom) AS incidents,
       count(i.symptom) / nullif((SELECT count(*) FROM incidents), 0) AS share
FROM paper p LEFT JOIN incidents i ON list_contains(p.symptoms, i.symptom)
GROUP BY p.name, p.count ORDER BY p.count DESC;
