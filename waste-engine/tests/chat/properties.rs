//! Conversations and answers that nobody expects.
