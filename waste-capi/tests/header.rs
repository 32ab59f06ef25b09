//! The header in the source tree is the one that the source says.
#![allow(clippy::unwrap_used)]

use std::path::Path;

#[test]
fn the_header_is_that_of_the_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let mut sources = cbindgen::Builder::new().with_config(config);
    for file in ["error", "info", "raw", "options", "model", "params", "session", "images"] {
        sources = sources.with_src(root.join(format!("src/{file}.rs")));
    }
    let mut header = Vec::new();
    sources.generate().unwrap().write(&mut header);
    let header = String::from_utf8(header).unwrap();
    let path = root.join("include/waste.h");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &header).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default().replace("\r\n", "\n");
    assert!(found == header, "include/waste.h is stale: UPDATE=1 cargo test -p waste-capi --test header");
}
