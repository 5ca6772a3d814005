// llama.cpp's drafters without a model, as plain functions. Compiled together with its own speculative.cpp, ngram-cache.cpp,
// ngram-map.cpp and ngram-mod.cpp, which are not changed.
//
// Two ways to use them. `speculative_*` is llama-server's: common_speculative_init, _begin, _draft and _accept for one
// slot. `lookup_*` is that of the program examples/lookup/lookup.cpp: a context cache for each request, merged into the
// dynamic cache when the request has ended.

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "common.h"
#include "log.h"
#include "ngram-cache.h"
#include "speculative.h"

// What these files need of the rest of llama.cpp. They log, and time themselves: nobody reads either here.

int common_log_get_verbosity_thold(void) { return -1; }
struct common_log * common_log_main() { return nullptr; }
void common_log_add(struct common_log *, enum ggml_log_level, const char *, ...) {}
std::string string_format(const char *, ...) { return {}; }
common_time_meas::common_time_meas(int64_t & t_acc, bool) : t_start_us(-1), t_acc(t_acc) {}
common_time_meas::~common_time_meas() {}

extern "C" int64_t ggml_time_ms(void) { return 0; }
extern "C" void ggml_abort(const char * file, int line, const char * fmt, ...) {
    va_list arguments;
    va_start(arguments, fmt);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, fmt, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    abort();
}

namespace {

struct speculative {
    common_params_speculative params;
    common_speculative_ptr state;
};

struct lookup {
    common_ngram_cache context, dynamic, fixed;
    llama_tokens text;
};

} // namespace

extern "C" {

// A drafter of llama-server by the name that --spec-type takes; nullptr where there is none of that name. `first`,
// `second`, `third`: n_match, n_min, n_max of ngram-mod; size_n, size_m, min_hits of ngram-simple and ngram-map-*.
void * speculative_open(const char * type, int32_t first, int32_t second, int32_t third) {
    try {
        auto * opened = new speculative;
        opened->params.types = common_speculative_types_from_names({type});
        opened->params.ngram_mod = {first, third, second}; // n_match, n_max, n_min
        common_params_speculative_ngram_map map{(uint16_t) first, (uint16_t) second, (uint16_t) third};
        opened->params.ngram_simple = opened->params.ngram_map_k = opened->params.ngram_map_k4v = map;
        opened->state.reset(common_speculative_init(opened->params, 1));
        if (!opened->state) {
            delete opened;
            return nullptr;
        }
        return opened;
    } catch (const std::exception &) {
        return nullptr;
    }
}

void speculative_close(void * opened) { delete static_cast<speculative *>(opened); }

// A request whose text so far is `text`; its last token counts as sampled.
void speculative_begin(void * opened, const int32_t * text, size_t size) {
    common_speculative_begin(static_cast<speculative *>(opened)->state.get(), 0, llama_tokens(text, text + (size ? size - 1 : 0)));
}

// A draft of at most `most` tokens into `draft`; returns how many.
int32_t speculative_draft(void * opened, const int32_t * text, size_t size, int32_t most, int32_t * draft) {
    auto * state = static_cast<speculative *>(opened)->state.get();
    const llama_tokens prompt(text, text + size - 1);
    llama_tokens result;
    common_speculative_get_draft_params(state, 0) = {true, most, (llama_pos) size - 1, text[size - 1], &prompt, &result};
    common_speculative_draft(state);
    std::memcpy(draft, result.data(), result.size() * sizeof(int32_t));
    return (int32_t) result.size();
}

// How many tokens of the last draft, which was not empty, were accepted.
void speculative_accept(void * opened, int32_t accepted) {
    common_speculative_accept(static_cast<speculative *>(opened)->state.get(), 0, (uint16_t) accepted);
}

void * lookup_open() { return new lookup; }

// A request begins: its context cache holds its prompt.
void lookup_begin(void * opened, const int32_t * text, size_t size) {
    auto * self = static_cast<lookup *>(opened);
    self->context.clear();
    self->text.assign(text, text + size);
    common_ngram_cache_update(
            self->context, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, self->text, (int) self->text.size(), false);
}

// Tokens of the request that were verified, one by one as the program adds them.
void lookup_add(void * opened, const int32_t * tokens, size_t size) {
    auto * self = static_cast<lookup *>(opened);
    for (size_t i = 0; i < size; ++i) {
        self->text.push_back(tokens[i]);
        common_ngram_cache_update(self->context, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, self->text, 1, false);
    }
}

// As speculative_draft.
int32_t lookup_draft(void * opened, int32_t most, int32_t * draft) {
    auto * self = static_cast<lookup *>(opened);
    llama_tokens result = {self->text.back()};
    common_ngram_cache_draft(
            self->text, result, most, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, self->context, self->dynamic, self->fixed);
    std::memcpy(draft, result.data() + 1, (result.size() - 1) * sizeof(int32_t));
    return (int32_t) result.size() - 1;
}

// The request has ended. With `keep` what it said counts from now on.
void lookup_end(void * opened, int32_t keep) {
    auto * self = static_cast<lookup *>(opened);
    if (keep) {
        common_ngram_cache_merge(self->dynamic, self->context);
    }
    self->context.clear();
}

} // extern "C"
