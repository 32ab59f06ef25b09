//! Lines that begin with `/`. A new command is a variant, a word in [`parse`], a line of [`HELP`] and an arm in
//! `Chat::command`.

use std::path::PathBuf;

/// What a line means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// It is blank.
    Nothing,
    /// For the model.
    Message(String),
    /// For us.
    Command(Command),
    /// A command that does not exist.
    Unknown(String),
}

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Show or hide thinking.
    Think,
    /// Begin anew.
    Reset,
    /// Put an image into the next message.
    Image(PathBuf),
    /// Keep the conversation in a file.
    Save(PathBuf),
    /// Go on with one that was kept.
    Load(PathBuf),
    /// Say how it goes.
    Stats,
    /// Show or set what the model is told.
    System(Option<String>),
    /// List the commands.
    Help,
    /// End.
    Quit,
}

/// The commands.
pub const HELP: &str = "\
/think          show or hide what the model thinks
/system [TEXT]  say what the model is told before all, or tell it more
/image FILE     put an image into the next message (needs --vision)
/reset          begin a new conversation
/save FILE      keep the conversation, with all the model knows of it
/load FILE      go on with one that was kept; it takes the place of this one
/stats          speed, context, cache
/help           this
/quit           end, as does Ctrl-D
//…             a message that begins with /
Ctrl-C stops an answer. The history does not keep a line that begins with a space, or that looks as if it holds a
password or a key.";

/// What a line means.
pub fn parse(line: &str) -> Line {
    let trimmed = line.trim();
    if trimmed.is_empty() {
        return Line::Nothing;
    }
    let Some(command) = trimmed.strip_prefix('/') else { return Line::Message(line.to_owned()) };
    if command.starts_with('/') {
        return Line::Message(command.to_owned());
    }
    let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    let rest = rest.trim();
    match (word, rest) {
        ("think", "") => Line::Command(Command::Think),
        ("reset", "") => Line::Command(Command::Reset),
        ("image", file) if !file.is_empty() => Line::Command(Command::Image(file.into())),
        ("save", file) if !file.is_empty() => Line::Command(Command::Save(file.into())),
        ("load", file) if !file.is_empty() => Line::Command(Command::Load(file.into())),
        ("stats", "") => Line::Command(Command::Stats),
        ("system", "") => Line::Command(Command::System(None)),
        ("system", text) => Line::Command(Command::System(Some(text.to_owned()))),
        ("help", "") => Line::Command(Command::Help),
        ("quit" | "exit", "") => Line::Command(Command::Quit),
        _ => Line::Unknown(format!("/{command}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        assert_eq!(parse("  \t"), Line::Nothing);
        assert_eq!(parse(" keep me "), Line::Message(" keep me ".to_owned()));
        assert_eq!(parse("//etc/hosts"), Line::Message("/etc/hosts".to_owned()));
        assert_eq!(
            parse("/system  Be brief. "),
            Line::Command(Command::System(Some("Be brief.".to_owned())))
        );
        assert_eq!(parse("/system"), Line::Command(Command::System(None)));
        assert_eq!(parse("/quit"), Line::Command(Command::Quit));
        assert_eq!(parse("/reset all"), Line::Unknown("/reset all".to_owned()));
        assert_eq!(parse("/save"), Line::Unknown("/save".to_owned()));
        assert_eq!(parse("/image"), Line::Unknown("/image".to_owned()));
        assert_eq!(parse("/load  a b "), Line::Command(Command::Load("a b".into())));
        for line in HELP.lines().filter(|line| line.starts_with('/')) {
            let usage = line.split("  ").next().unwrap();
            assert!(!matches!(parse(usage), Line::Unknown(_)), "{usage}");
        }
    }
}
