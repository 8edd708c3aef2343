/**
 * The messages of `ramify.v1` as types: what the fields mean is in docs/protocol.md.
 *
 * @typedef {"bad_request" | "unauthorized" | "forbidden" | "no_session" | "no_branch" | "exists" | "conflict"
 *   | "limit" | "too_long" | "bad_constraint" | "unsupported" | "overloaded" | "deadline" | "cancelled"
 *   | "skipped" | "internal"} ErrorCode
 * @typedef {"system" | "user" | "assistant" | "tool"} Role
 * @typedef {"stop" | "length" | "tool" | "cancelled" | "deadline" | "error"} Reason  why a generation ended
 *
 * @typedef {object} ChatMessage  One turn.
 * @property {Role} role
 * @property {string} [content]
 * @property {string} [name]
 * @property {string} [tool_call_id]
 * @property {object[]} [tool_calls]
 * @property {string} [reasoning]  of an assistant, for templates that show it
 *
 * @typedef {object} Constraint  What an output must be: one of the fields.
 * @property {string} [regex]
 * @property {object | string} [json_schema]
 * @property {string[]} [choices]
 * @property {string} [grammar]
 * @property {object} [structural_tag]  free text with constrained parts, as docs/protocol.md tells
 * @property {boolean} [after_thought]  what the model thinks first is free
 * @property {boolean} [continue]  whether it goes on with the constrained output that the branch ends in
 *
 * @typedef {object} ToolCall
 * @property {string} id
 * @property {"function"} type
 * @property {{name: string, arguments: string}} function  `arguments`: the JSON text of an object
 *
 * @typedef {object} OpenFields  Fields of `open` that stay the same in a session.
 * @property {string} [model]
 * @property {number} [ttl_s]
 * @property {"run" | "pause" | "cancel"} [detach]
 * @property {number} [tick_ms]
 * @property {boolean} [tokens]
 * @property {boolean} [parts]
 * @property {boolean} [usage]  the first delta of each generation has `prompt` and `cached`
 * @property {object[]} [tools]
 * @property {"low" | "medium" | "high"} [effort]  for chat templates that tell the model how much to think
 * @property {"append" | "strict"} [template]
 *
 * @typedef {object} GenerateFields
 * @property {number} [max_tokens]
 * @property {number} [temperature]
 * @property {number} [top_p]
 * @property {number} [top_k]
 * @property {number} [min_p]
 * @property {number} [frequency_penalty]
 * @property {number} [presence_penalty]
 * @property {number} [repetition_penalty]
 * @property {number} [seed]
 * @property {string[]} [stop]
 * @property {number[]} [stop_token_ids]
 * @property {boolean} [ignore_eos]
 * @property {Constraint} [constraint]
 * @property {number} [logprobs]
 * @property {number} [n]  so many children, each with a generation
 * @property {string[]} [as]  their names
 * @property {number} [priority]
 * @property {number} [deadline_ms]
 * @property {boolean} [quiet]
 * @property {boolean} [hidden]
 * @property {boolean} [keep_open]
 * @property {string} [tool_choice]
 * @property {boolean} [parallel_tool_calls]
 * @property {number} [thought_tokens]  a longer thought is ended; 0: there is none
 * @property {number} [expect]
 *
 * @typedef {object} SelectFields
 * @property {"token_length_normalized" | "greedy_token_selection" | "unconditional_likelihood_normalized"} [method]
 * @property {number} [priority]
 * @property {number} [deadline_ms]
 * @property {number} [expect]
 *
 * @typedef {object} JoinFields
 * @property {string} [prefix]
 * @property {string} [each]  for each source, where {i}, {name} and {text} are the source's
 * @property {string} [suffix]
 * @property {Role | null} [role]  of the turn; null: raw text
 * @property {boolean} [keep]
 *
 * @typedef {object} PruneFields
 * @property {"first" | "logprob" | "number" | "vote"} [by]
 * @property {number} [k]
 * @property {boolean} [keep]
 *
 * @typedef {object} Place  Where an answer to `tree` ended.
 * @property {string} branch
 * @property {number} position
 *
 * @typedef {object} Op  A message with an id, as it is sent.
 * @property {"append" | "generate" | "select" | "fork" | "join" | "prune" | "rollback" | "set" | "drop" | "tree"
 *   | "export" | "cancel" | "close"} type
 * @property {number} id
 * @property {string | string[] | null} [branch]
 * @property {string[]} [as]
 * @property {string[]} [from]
 * @property {string | string[]} [into]
 * @property {string[]} [score_from]
 * @property {string} [name]
 * @property {number} [at]
 * @property {number} [n]
 * @property {boolean} [hidden]
 *
 * @typedef {object} Turn  One segment of a branch, [start, end) in tokens.
 * @property {"input" | "output"} kind
 * @property {number} start
 * @property {number} end
 * @property {number} [op]
 * @property {string} [role]
 * @property {string} [text]
 * @property {number[]} [tokens]
 * @property {ChatMessage[]} [messages]
 *
 * @typedef {object} BranchState
 * @property {string} branch
 * @property {number} position
 * @property {string} [parent]
 * @property {number} [at]
 * @property {number} [running]
 * @property {number} [started_at]
 * @property {"gpu" | "host" | "disk" | "none"} [kv]
 * @property {number} [resident]
 * @property {number} [retain_s]
 * @property {"none" | "lazy" | "sync"} [persist]  if not as the session
 * @property {Reason} [reason]
 * @property {Record<string, unknown>} [meta]
 * @property {Turn[]} [turns]
 * @property {number} [turns_from]
 * @property {Usage} [usage]  of the generation that ended so, in a `tree` of one branch
 *
 * @typedef {object} StateMessage
 * @property {"state"} type
 * @property {string} session
 * @property {number} op
 * @property {number} revision
 * @property {BranchState[]} branches
 * @property {string} [client]
 * @property {string} [key]
 * @property {string} [view_key]
 * @property {boolean} [resumed]
 * @property {boolean} [cold]
 * @property {boolean} [lost] the server restarted without what this client has seen last
 * @property {"none" | "lazy" | "sync"} [persist] how the session is saved
 * @property {Record<string, number>} [limits]
 * @property {{version: number, epoch: string, model: string, context?: number}} [server]
 * @property {Record<string, unknown>} [meta]
 * @property {number} [id]
 * @property {number} [ttl_s]
 * @property {string[]} [tools] names of those in force
 * @property {string[]} [notes] on `open.template`
 * @property {Place} [next]
 *
 * @typedef {object} OkMessage
 * @property {"ok"} type
 * @property {number} id
 * @property {string} [branch]
 * @property {number} [position]
 * @property {number} [revision]
 * @property {OpResult} [result]
 *
 * @typedef {object} OpResult  What an op came to.
 * @property {number} [rebased]
 * @property {{from: string, into: string, position: number, rebased?: number}[]} [kept]
 * @property {string[]} [dropped]
 * @property {Record<string, number | null>} [scores]
 * @property {number} [cancelled]
 * @property {string} [file]  what `export` wrote, in base64
 *
 * @typedef {object} TokenLogprob
 * @property {number} token
 * @property {number} logprob
 * @property {[number, number][]} [top]
 *
 * @typedef {object} Part  A part of a delta's text, and what it is.
 * @property {"text" | "reasoning" | "call" | "markup"} kind
 * @property {string} text
 * @property {number} [call]
 * @property {string} [id]
 * @property {string} [name]
 * @property {string} [arguments]
 *
 * @typedef {object} DeltaMessage
 * @property {"delta"} type
 * @property {string} branch
 * @property {number} position
 * @property {string} text
 * @property {Part[]} [parts]
 * @property {number[]} [tokens]
 * @property {TokenLogprob[]} [logprobs]
 * @property {number} [truncate]
 * @property {number} [prompt]  this and the next with `open.usage`, as in `Usage`
 * @property {number} [cached]
 *
 * @typedef {object} KvHints  Suggestions for KV; the reply's `result.kv_hints` says what became of each.
 * @property {"0.1"} protocol_version
 * @property {string} message_id
 * @property {{action_id: string, action_type: string, action_version: string, payload?: Record<string, unknown>}[]} actions
 *
 * @typedef {object} Usage  Tokens, and milliseconds from the op's arrival.
 * @property {number} prompt
 * @property {number} cached
 * @property {number} computed
 * @property {number} output
 * @property {number} forced
 * @property {number} [accepted]
 * @property {number} [thought]
 * @property {{gpu?: number, host?: number, disk?: number}} hit
 * @property {number} queue_ms
 * @property {number | null} ttft_ms
 * @property {number} total_ms
 *
 * @typedef {object} DoneMessage
 * @property {"done"} type
 * @property {number} id
 * @property {string} branch
 * @property {number} position
 * @property {Reason} reason
 * @property {Usage} usage
 * @property {number} [revision]
 * @property {string} [text]
 * @property {ToolCall[]} [tool_calls]
 * @property {string | number} [stop]
 * @property {number} [choice]
 * @property {number[]} [scores]
 * @property {number} [rebased]
 * @property {number} [mean_logprob]
 * @property {ErrorCode} [error]
 * @property {string} [message]
 * @property {string[]} [notes]
 * @property {string} [content]
 * @property {string} [reasoning]
 * @property {{reason: "new" | "edited" | "evicted" | "expired", message?: number, tokens?: number}} [miss]
 *
 * @typedef {object} ErrorMessage
 * @property {"error"} type
 * @property {ErrorCode} code
 * @property {string} message
 * @property {number} [id]
 * @property {string} [branch]
 * @property {number} [retry_ms]
 * @property {Record<string, unknown>} [details]
 *
 * @typedef {object} EventFields
 * @property {"event"} type
 * @property {number} revision
 * @property {string} [branch]
 * @property {string} [by]  the client that did it
 *
 * @typedef {Pick<OpResult, "rebased" | "kept" | "dropped"> & {position?: number}} Moved  Where the branch ends now.
 *
 * @typedef {EventFields & (
 *   {op: "append" | "join" | "rollback" | "prune" | "drop", details?: Moved}
 *   | {op: "generate" | "select", details?: Moved & {reason?: Reason}}
 *   | {op: "fork", details?: Moved & {as?: string[]}}
 *   | {op: "set", details?: Moved & {from?: string}}
 * )} EventMessage  Another client changed the tree: `op` tells how, and what `details` has.
 *
 * @typedef {{type: "bye", reason: string, after_ms: number}} ByeMessage
 * @typedef {{type: "pong", n: number, load: Record<string, number>}} PongMessage
 *
 * @typedef {StateMessage | OkMessage | DeltaMessage | DoneMessage | ErrorMessage | EventMessage | ByeMessage
 *   | PongMessage} ServerMessage
 * @typedef {EventMessage | DeltaMessage | ErrorMessage} Note  What no op here has asked for: `type` tells which it is.
 */

export {};
