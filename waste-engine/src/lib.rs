//! The WASTE model engine.
