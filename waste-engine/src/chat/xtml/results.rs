//! Which call a tool's answer belongs to.

use std::collections::HashMap;

use crate::chat::conversation::{Call, Message};
use crate::chat::error::ChatError;

/// A message in its place.
pub struct Resolved<'a> {
    /// Its place among the messages as they came.
    pub index: usize,
    pub message: &'a Message,
    /// Of a tool's answer: whose, and which.
    pub result: Option<Answer>,
}

/// A tool's answer.
pub struct Answer {
    /// The tool.
    pub name: String,
    /// The how manieth since the last assistant message, from 1.
    pub index: usize,
}

/// Puts the answers of each run of tool messages into the order of the calls, if every one names a call.
pub fn resolve(messages: &[Message]) -> Result<Vec<Resolved<'_>>, ChatError> {
    let mut resolved = Vec::with_capacity(messages.len());
    let mut calls: &[Call] = &[];
    let mut count = 0;
    let mut at = 0;
    while let Some(message) = messages.get(at) {
        let is_tool = |message: &&Message| matches!(message, Message::Tool { .. });
        let run = messages[at..].iter().take_while(is_tool).count();
        if run == 0 {
            if let Message::Assistant { calls: new, .. } = message {
                (calls, count) = (new, 0);
            }
            resolved.push(Resolved { index: at, message, result: None });
            at += 1;
            continue;
        }
        for (index, matched) in in_call_order(&messages[at..at + run], calls) {
            count += 1;
            let message = &messages[at + index];
            let own = match message {
                Message::Tool { name, .. } if !name.is_empty() => Some(name),
                _ => None,
            };
            let positional = || calls.get(count - 1).map(|call| &call.name);
            let name = matched.map(|call| &call.name).or(own).or_else(positional);
            let name = name.cloned().ok_or_else(|| {
                ChatError::message(at + index, "", "no call and no name says which tool answers here")
            })?;
            resolved.push(Resolved {
                index: at + index,
                message,
                result: Some(Answer { name, index: count }),
            });
        }
        at += run;
    }
    Ok(resolved)
}

/// The messages of a run by their places in it, with their calls; as they came if one has none.
fn in_call_order<'a>(run: &[Message], calls: &'a [Call]) -> Vec<(usize, Option<&'a Call>)> {
    let mut positions = HashMap::new();
    for (position, call) in calls.iter().enumerate() {
        if let Some(id) = &call.id {
            positions.entry(id.as_str()).or_insert(position);
        }
    }
    let position = |message: &Message| match message {
        Message::Tool { id: Some(id), .. } => positions.get(id.as_str()).copied(),
        _ => None,
    };
    let found: Option<Vec<usize>> = run.iter().map(position).collect();
    match found {
        Some(found) => {
            let mut order: Vec<(usize, usize)> = found.into_iter().zip(0..).collect();
            order.sort_unstable();
            order.into_iter().map(|(position, index)| (index, calls.get(position))).collect()
        }
        None => (0..run.len()).map(|index| (index, None)).collect(),
    }
}
