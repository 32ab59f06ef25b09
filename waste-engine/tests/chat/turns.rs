//! The formats without vectors: Kimi turn markers and chat.json.
