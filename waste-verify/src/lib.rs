//! Tells whether a .waste container is sound, and where it is not.
#![forbid(unsafe_code)]
