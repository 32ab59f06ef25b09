//! The system messages the format writes itself. They are constants of the model: every byte counts.

use crate::chat::conversation::Effort;
use crate::chat::json::{Json, Style};

pub const TOOLS_REQUIRED: &str =
    "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.";
pub const TOOLS_NONE: &str =
    "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.";
pub const JSON_OBJECT: &str = "The system is invoked with `response_format=json_object`.\nYour response must be raw \
                               JSON data without markdown code blocks (```json) or any additional formatting.";

pub fn tools(tools: &[Json]) -> String {
    format!(
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```",
        sorted(tools)
    )
}

pub fn more_tools(tools: &[Json]) -> String {
    format!(
        "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to all \
         existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n{}\n```",
        sorted(tools)
    )
}

fn sorted(tools: &[Json]) -> String {
    Json::Array(tools.to_vec()).text(Style::Sorted)
}

pub fn effort(effort: Effort) -> String {
    format!(
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), \
         supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with \
         `thinking_effort={}`.",
        effort.name()
    )
}

pub fn schema(schema: &Json) -> String {
    format!(
        "The system is invoked with `response_format=json_schema`.\nYour response must be raw JSON data without \
         markdown code blocks (```json) or any additional formatting.\nThe JSON data must match the following \
         schema:\n```json\n{}\n```",
        schema.text(Style::Sorted)
    )
}
