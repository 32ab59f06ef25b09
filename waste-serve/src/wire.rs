//! Answers as the OpenAI API writes them: whole, or in chunks.

use serde_json::{Map, Value, json};
use waste_engine::chat::Delta;

use crate::job::{Finished, TokenLogprob};
use crate::request::Asked;
use crate::service::{Service, unix_seconds};

/// Letters of ids.
const BASE62: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Which endpoint's words are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}

/// An id that nobody has had: 24 random characters.
pub fn random_id(prefix: &str) -> String {
    let mut id = prefix.to_owned();
    while id.len() < prefix.len() + 24 {
        // Without random numbers of the system ids are only unlikely to be unique.
        let bits = getrandom::u64().unwrap_or_else(|_| unix_seconds().wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let digit = |place: u32| BASE62[(bits >> (6 * place) & 63) as usize % 62] as char;
        id.extend((0..8).map(digit));
    }
    id
}

/// What all parts of one answer have in common.
pub struct Envelope {
    dialect: Dialect,
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    include_usage: bool,
    extra: Option<Map<String, Value>>,
    calls: Vec<String>,
}

impl Envelope {
    /// For the answer to a request.
    pub fn new(service: &Service, dialect: Dialect, asked: &Asked) -> Envelope {
        let prefix = if dialect == Dialect::Chat { "chatcmpl-" } else { "cmpl-" };
        let extra = service.settings.extra.then(|| {
            let mut extra = Map::new();
            if dialect == Dialect::Chat {
                extra.insert("thinking".to_owned(), asked.thinking.into());
                extra.insert("thinking_effort".to_owned(), asked.effort.map(|effort| effort.name()).into());
                if asked.strict {
                    extra.insert("strict".to_owned(), "prompt-only".into());
                }
                if let Some(kept) = asked.json {
                    extra.insert("grammar".to_owned(), kept.name().into());
                }
            }
            extra
        });
        Envelope {
            dialect,
            id: random_id(prefix),
            created: unix_seconds(),
            model: service.settings.model_id.clone(),
            fingerprint: service.fingerprint.clone(),
            include_usage: asked.include_usage,
            extra,
            calls: Vec::new(),
        }
    }

    fn object(&self, kind: &str, choices: Value) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("id".to_owned(), self.id.as_str().into());
        object.insert("object".to_owned(), kind.into());
        object.insert("created".to_owned(), self.created.into());
        object.insert("model".to_owned(), self.model.as_str().into());
        object.insert("system_fingerprint".to_owned(), self.fingerprint.as_str().into());
        object.insert("choices".to_owned(), choices);
        object
    }

    fn call_id(&mut self, index: usize) -> &str {
        while self.calls.len() <= index {
            self.calls.push(random_id("call_"));
        }
        &self.calls[index]
    }

    /// A chunk of a stream: one choice.
    fn chunk(&self, choice: Value) -> Map<String, Value> {
        let kind = match self.dialect {
            Dialect::Chat => "chat.completion.chunk",
            Dialect::Completion => "text_completion",
        };
        let mut object = self.object(kind, json!([choice]));
        if self.include_usage {
            object.insert("usage".to_owned(), Value::Null);
        }
        object
    }

    /// The chunk that begins a stream.
    pub fn first(&self) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        (self.dialect == Dialect::Chat).then(|| {
            self.chunk(json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": null})).into()
        })
    }

    /// The chunks of a token.
    pub fn deltas(
        &mut self,
        service: &Service,
        deltas: Vec<Delta>,
        logprob: Option<TokenLogprob>,
        at: usize,
    ) -> Vec<Value> {
        let mut logprobs = logprob.map(|logprob| self.logprobs(service, &[logprob], at));
        let mut chunks = Vec::new();
        for delta in deltas {
            let content = matches!(delta, Delta::Content(_));
            let logprobs = if content { logprobs.take() } else { None };
            if let Some(choice) = self.choice(delta, logprobs) {
                chunks.push(self.chunk(choice).into());
            }
        }
        // Half a character has a probability, but no text yet.
        if let Some(logprobs) = logprobs
            && let Some(choice) = self.choice(Delta::Content(String::new()), Some(logprobs))
        {
            chunks.push(self.chunk(choice).into());
        }
        chunks
    }

    fn choice(&mut self, delta: Delta, logprobs: Option<Value>) -> Option<Value> {
        if self.dialect == Dialect::Completion {
            let Delta::Content(text) = delta else { return None };
            return Some(json!({"index": 0, "text": text, "logprobs": logprobs, "finish_reason": null}));
        }
        let delta = match delta {
            Delta::Reasoning(text) => json!({"reasoning_content": text}),
            Delta::Content(text) => json!({"content": text}),
            Delta::Call { index, name } => json!({"tool_calls": [{
                "index": index, "id": self.call_id(index), "type": "function",
                "function": {"name": name, "arguments": ""},
            }]}),
            Delta::Arguments { index, text } => {
                json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            }
        };
        Some(json!({"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": null}))
    }

    /// The chunks that end a stream.
    pub fn last(&self, finished: &Finished) -> Vec<Value> {
        let mut chunk = self.chunk(match self.dialect {
            Dialect::Chat => {
                json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": finished.reason})
            }
            Dialect::Completion => {
                json!({"index": 0, "text": "", "logprobs": null, "finish_reason": finished.reason})
            }
        });
        self.add_extra(finished, &mut chunk);
        let mut chunks = vec![chunk.into()];
        if self.include_usage {
            let kind =
                if self.dialect == Dialect::Chat { "chat.completion.chunk" } else { "text_completion" };
            let mut object = self.object(kind, json!([]));
            object.insert("usage".to_owned(), usage(finished));
            chunks.push(object.into());
        }
        chunks
    }

    /// A whole answer.
    pub fn whole(
        &mut self,
        service: &Service,
        parts: Vec<Delta>,
        logprobs: &[TokenLogprob],
        finished: &Finished,
    ) -> Value {
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for delta in parts {
            match delta {
                Delta::Reasoning(text) => reasoning += &text,
                Delta::Content(text) => content += &text,
                Delta::Call { name, .. } => calls.push((name, String::new())),
                Delta::Arguments { index, text } => {
                    if let Some((_, arguments)) = calls.get_mut(index) {
                        *arguments += &text;
                    }
                }
            }
        }
        let logprobs = match logprobs {
            [] => Value::Null,
            some => self.logprobs(service, some, 0),
        };
        let (kind, choice) = match self.dialect {
            Dialect::Completion => (
                "text_completion",
                json!({"index": 0, "text": content, "logprobs": logprobs, "finish_reason": finished.reason}),
            ),
            Dialect::Chat => {
                let text = (!content.is_empty() || calls.is_empty()).then_some(content);
                let mut message = json!({"role": "assistant", "content": text, "refusal": null});
                if !reasoning.is_empty() {
                    message["reasoning_content"] = reasoning.into();
                }
                if !calls.is_empty() {
                    let call = |(i, (name, arguments)): (usize, (String, String))| {
                        json!({
                            "id": self.call_id(i), "type": "function",
                            "function": {"name": name, "arguments": arguments},
                        })
                    };
                    message["tool_calls"] = calls.into_iter().enumerate().map(call).collect();
                }
                let choice = json!({
                    "index": 0, "message": message, "logprobs": logprobs, "finish_reason": finished.reason,
                });
                ("chat.completion", choice)
            }
        };
        let mut object = self.object(kind, json!([choice]));
        object.insert("usage".to_owned(), usage(finished));
        self.add_extra(finished, &mut object);
        object.into()
    }

    fn add_extra(&self, finished: &Finished, object: &mut Map<String, Value>) {
        let Some(extra) = &self.extra else { return };
        let reads = finished.reads;
        let demands = (reads.hits + reads.misses) as f64;
        let mut waste = json!({
            "queue_ms": finished.queue_ms,
            "prefill_ms": finished.prefill_ms,
            "decode_ms": finished.decode_ms,
            "tokens_per_s": finished.tokens_per_second(),
            "prompt_reused": finished.cached_tokens,
            "expert_hits": reads.hits,
            "expert_misses": reads.misses,
            "expert_hit_rate": if demands > 0.0 { reads.hits as f64 / demands } else { 0.0 },
            "bytes_read": reads.bytes,
            "direct_io": reads.direct_io,
            "seed": finished.seed,
        });
        if let Some(object) = waste.as_object_mut() {
            object.extend(extra.clone());
        }
        object.insert("waste".to_owned(), waste);
    }

    fn logprobs(&self, service: &Service, tokens: &[TokenLogprob], at: usize) -> Value {
        let bytes = |id: u32| service.tokenizer.token_bytes(id).unwrap_or_default().to_vec();
        let text = |id: u32| String::from_utf8_lossy(&bytes(id)).into_owned();
        if self.dialect == Dialect::Completion {
            let mut offset = at;
            let mut offsets = Vec::new();
            for token in tokens {
                offsets.push(offset);
                offset += text(token.id).chars().count();
            }
            let top = |token: &TokenLogprob| -> Map<String, Value> {
                token.top.iter().map(|(id, logprob)| (text(*id), (*logprob).into())).collect()
            };
            return json!({
                "tokens": tokens.iter().map(|token| text(token.id)).collect::<Vec<_>>(),
                "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
                "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
                "text_offset": offsets,
            });
        }
        let one = |id: u32, logprob: f64| json!({"token": text(id), "logprob": logprob, "bytes": bytes(id)});
        let content = tokens.iter().map(|token| {
            let mut entry = one(token.id, token.logprob);
            entry["top_logprobs"] = token.top.iter().map(|(id, logprob)| one(*id, *logprob)).collect();
            entry
        });
        json!({"content": content.collect::<Vec<_>>(), "refusal": null})
    }
}

fn usage(finished: &Finished) -> Value {
    json!({
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": finished.counts.reasoning},
    })
}

/// An event of a stream.
pub fn frame(json: &Value) -> String {
    format!("data: {json}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_long_and_differ() {
        let ids: std::collections::HashSet<String> = (0..1000).map(|_| random_id("call_")).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == 29 && id[5..].bytes().all(|b| b.is_ascii_alphanumeric())));
    }
}
