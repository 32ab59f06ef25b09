/* Opens a model with its vision tower, and writes a text about an image.
 *
 *     image MODEL IMAGE [PROMPT]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "waste.h"

static void check(waste_status status, const char *doing)
{
    if (status != WASTE_STATUS_OK) {
        fprintf(stderr, "%s: %s (%s)\n", doing, waste_last_error(), waste_last_error_code());
        exit(status);
    }
}

static int32_t progress(void *user, uint64_t bytes, uint64_t of)
{
    (void)user;
    fprintf(stderr, "\rloading: %d %%", of > 0 ? (int)(100.0 * bytes / of) : 100);
    return 0;
}

static int32_t show(void *user, const char *text, size_t length)
{
    (void)user;
    fwrite(text, 1, length, stdout);
    return 0;
}

/* A file of at most as many bytes as the library accepts. */
static uint8_t *read_file(const char *path, size_t *length)
{
    const size_t most = 20 << 20;
    uint8_t *bytes = malloc(most);
    FILE *file = fopen(path, "rb");
    if (bytes == NULL || file == NULL) {
        fprintf(stderr, "%s cannot be read\n", path);
        exit(3);
    }
    *length = fread(bytes, 1, most, file);
    fclose(file);
    return bytes;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: image MODEL IMAGE [PROMPT]\n");
        return 2;
    }
    const char *prompt = argc > 3 ? argv[3] : "It shows";
    size_t length;
    uint8_t *file = read_file(argv[2], &length);

    waste_options options = {sizeof options};
    options.vision = 1;
    options.on_load = progress;
    waste_model *model;
    check(waste_open(argv[1], &options, &model), "opening");
    fprintf(stderr, "\n");

    waste_session *session;
    check(waste_session_open(model, &session), "making a session");
    waste_image_info image = {sizeof image};
    check(waste_session_attach(session, file, length, &image), "encoding the image");
    fprintf(stderr, "%d x %d pixels, %d positions\n", (int)image.width, (int)image.height, (int)image.positions);
    free(file);

    /* The image's tokens, then the prompt's: there are at most as many as bytes. */
    size_t count, text_count;
    check(waste_image_tokens(model, &image, NULL, 0, &count), "counting the image's tokens");
    uint32_t *ids = malloc((count + strlen(prompt)) * sizeof *ids);
    if (ids == NULL)
        return 4;
    check(waste_image_tokens(model, &image, ids, count, &count), "writing the image's tokens");
    check(waste_tokenize(model, prompt, strlen(prompt), ids + count, strlen(prompt), &text_count), "tokenizing");

    waste_params params = {sizeof params};
    params.max_tokens = 20;
    printf("%s", prompt);
    check(waste_generate(session, ids, count + text_count, &params, show, NULL, NULL), "writing");
    printf("\n");

    waste_session_close(session);
    waste_close(model);
    free(ids);
    return 0;
}
