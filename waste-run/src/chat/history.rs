//! Where what was typed is kept, and what is not.

use std::path::PathBuf;

/// The history file: in the state directory of the user.
pub fn path() -> Option<PathBuf> {
    let dir = |key: &str| std::env::var_os(key).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = if cfg!(windows) {
        dir("LOCALAPPDATA")?
    } else {
        dir("XDG_STATE_HOME").or_else(|| dir("HOME").map(|home| home.join(".local/state")))?
    };
    Some(state.join("waste").join("history"))
}

/// Whether a line is kept: not if it begins with a space, nor if it looks like it holds a secret.
pub fn keeps(line: &str) -> bool {
    const WORDS: [&str; 9] = [
        "password",
        "passwd",
        "passphrase",
        "secret",
        "api_key",
        "apikey",
        "api key",
        "bearer ",
        "private key",
    ];
    let lower = line.to_lowercase();
    let looks_like_a_key = |word: &str| {
        let digits = word.bytes().filter(u8::is_ascii_digit).count();
        let plain = word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.+/=".contains(&byte));
        ["sk-", "hf_", "ghp_", "AKIA", "xox"].iter().any(|start| word.starts_with(start)) && word.len() >= 12
            || plain && word.len() >= 32 && digits >= 4 && !word.contains('/')
    };
    !line.starts_with(char::is_whitespace)
        && !WORDS.iter().any(|word| lower.contains(word))
        && !line.split(|c: char| c.is_whitespace() || "\"'`=:,;()".contains(c)).any(looks_like_a_key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_kept() {
        for kept in [
            "Tell me a story.",
            "What is 123456789 squared?",
            "/system Be brief.",
            "see src/a/b/c/d/e/f/g/h/i/j/1234.rs",
        ] {
            assert!(keeps(kept), "{kept}");
        }
        for dropped in [
            " hush",
            "my Password is swordfish",
            "HF_TOKEN=hf_abcdefghijkl",
            "use \"sk-proj-1234abcd\" there",
            "Authorization: Bearer x",
            "decode 0123456789abcdef0123456789abcdef",
            "-----BEGIN OPENSSH PRIVATE KEY-----",
        ] {
            assert!(!keeps(dropped), "{dropped}");
        }
    }
}
