#include "state/prefix_snapshot.hpp"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "engine/decoder.hpp"
#include "engine/inspect.hpp"

using namespace dflash;

namespace {

/// The built-in pair, its cache and its context, with n tokens in them.
struct Sequence {
    static std::shared_ptr<const TargetModel> target() {
        static const auto model = load_target_gguf(DFLASH_TEST_MODELS "/demo-target-q8_0.gguf", Device::open("cpu", 1));
        return model;
    }
    static std::shared_ptr<const DraftModel> drafter() {
        static const auto model =
            load_draft_gguf(DFLASH_TEST_MODELS "/demo-draft-bf16.gguf", target()->device(), target());
        return model;
    }

    explicit Sequence(int64_t n_tokens, int32_t salt = 0, int64_t capacity = 256, const std::string & kv = "f16",
                      int64_t full_rows = 512)
        : context(DraftContext::create(drafter(), draft_options(full_rows))) {
        TargetCacheOptions options;
        options.capacity = capacity;
        options.k_type = options.v_type = kv;
        options.capture_layers = drafter()->config().target_layer_ids;
        cache = TargetCache::create(target(), options);
        forward = std::make_unique<TargetForward>(*cache);
        draft = std::make_unique<DraftForward>(*context);
        add(n_tokens, salt);
    }

    static DraftContextOptions draft_options(int64_t full_rows) {
        DraftContextOptions options;
        options.full_rows = full_rows;
        return options;
    }

    void add(int64_t n, int32_t salt) {
        if (n == 0) {
            return;
        }
        std::vector<int32_t> ids;
        for (int64_t i = 0; i < n; ++i) {
            ids.push_back(static_cast<int32_t>((i * 37 + salt * 101 + static_cast<int64_t>(tokens.size())) % 4000));
        }
        ForwardRequest q;
        q.ids = ids.data();
        q.n = n;
        q.logit_rows = {n - 1};
        forward->forward(q);
        draft->append(*cache, context->cursor(), n);
        tokens.insert(tokens.end(), ids.begin(), ids.end());
    }

    SnapshotPtr take(SnapshotPtr parent = nullptr) const {
        SnapshotOptions options;
        options.tokens = tokens;
        options.parent = std::move(parent);
        return snapshot_target_cache(*cache, context.get(), options);
    }

    /// Everything that a next step reads.
    std::vector<float> state() const {
        std::vector<float> all;
        const auto add_all = [&](const std::vector<float> & values) {
            all.insert(all.end(), values.begin(), values.end());
        };
        const TargetConfig & c = cache->model().config();
        for (int32_t i = 0; i < c.n_layer; ++i) {
            const bool recurrent = c.recurrent[static_cast<size_t>(i)];
            add_all(read_cache_tensor(*cache, i, recurrent ? "recurrent" : "k", 0, cache->position()));
            add_all(read_cache_tensor(*cache, i, recurrent ? "conv" : "v", 0, cache->position()));
        }
        const PositionRange features = cache->feature_range();
        add_all(read_features(*cache, features.begin, features.end));
        for (int32_t i = 0; i < context->model().config().n_layer; ++i) {
            for (const char * what : {"k", "v"}) {
                add_all(read_draft_rows(*context, i, what, context->layer_begin(i), context->cursor()));
            }
        }
        add_all(cache->last_logits);
        all.push_back(static_cast<float>(cache->position()));
        all.push_back(static_cast<float>(features.begin));
        all.push_back(static_cast<float>(context->begin()));
        all.push_back(static_cast<float>(context->cursor()));
        return all;
    }

    /// Logits of three more tokens, and what the drafter thinks behind them.
    std::vector<float> go_on() {
        add(3, 7);
        draft->propose(11);
        std::vector<float> out = draft->logits();
        out.insert(out.end(), cache->last_logits.begin(), cache->last_logits.end());
        return out;
    }

    std::vector<int32_t> tokens;
    std::unique_ptr<TargetCache> cache;
    std::unique_ptr<DraftContext> context;
    std::unique_ptr<TargetForward> forward;
    std::unique_ptr<DraftForward> draft;
};

Status status_of(const std::function<void()> & body, std::string * message = nullptr) {
    try {
        body();
    } catch (const Error & error) {
        if (message != nullptr) {
            *message = error.what();
        }
        return error.status();
    }
    return Status::ok;
}

} // namespace

TEST(a_restore_goes_on_as_if_nothing_had_happened) {
    for (const char * kv : {"f32", "f16", "q8_0", "q4_0"}) {
        Sequence source(90, 0, 256, kv);
        const SnapshotPtr snapshot = source.take();
        Sequence other(40, 3, 700, kv); // another capacity, another sequence in it
        restore_target_cache(*snapshot, *other.cache, other.context.get());
        other.tokens = source.tokens;
        CHECK_EQ(other.cache->position(), 90);
        CHECK(other.cache->last_logits == source.cache->last_logits);
        CHECK(source.go_on() == other.go_on());
    }
}

TEST(a_failure_at_any_write_leaves_everything_as_it_was) {
    Sequence source(70);
    const SnapshotPtr parent = source.take();
    source.add(20, 1);
    for (const SnapshotPtr & snapshot : {parent, source.take(), source.take(parent)}) {
        for (const int64_t held : {0, 50, 120}) {
            Sequence victim(held, 5);
            Sequence same(held, 5);
            const std::vector<float> before = victim.state();
            int64_t n_writes = 0;
            for (int64_t fault = 0; fault >= 0; ++fault) {
                RestoreOptions options;
                options.before_write = [&](int64_t i) {
                    n_writes = std::max(n_writes, i + 1);
                    check(i != fault, Status::device, "injected");
                };
                if (status_of([&] { restore_target_cache(*snapshot, *victim.cache, victim.context.get(), options); }) ==
                    Status::ok) {
                    CHECK_EQ(fault, n_writes); // every single write has failed once
                    break;
                }
                REQUIRE(victim.state() == before);
            }
            CHECK(n_writes > 20);
            CHECK_EQ(victim.cache->position(), snapshot->position());
            CHECK(same.state() == before);
        }
    }
}

TEST(a_failed_restore_into_a_cache_in_use_does_not_change_what_it_says) {
    Sequence source(70);
    Sequence victim(50, 5);
    Sequence same(50, 5);
    RestoreOptions options;
    options.before_write = [&](int64_t i) { check(i < 25, Status::device, "injected"); };
    const SnapshotPtr snapshot = source.take();
    CHECK(status_of([&] { restore_target_cache(*snapshot, *victim.cache, victim.context.get(), options); }) ==
          Status::device);
    CHECK(victim.go_on() == same.go_on());
}

TEST(a_delta_is_its_slice_and_goes_on_like_a_full_one) {
    Sequence source(100);
    const SnapshotPtr first = source.take();
    source.add(30, 1);
    const SnapshotPtr second = source.take(first);
    source.add(5, 2);
    const SnapshotPtr third = source.take(second);
    const SnapshotPtr full = source.take();
    CHECK_EQ(third->depth(), 2);
    CHECK(third->bytes() < full->bytes());
    Sequence a(0), b(0);
    restore_target_cache(*third, *a.cache, a.context.get());
    restore_target_cache(*full, *b.cache, b.context.get());
    CHECK(a.state() == b.state());
    a.tokens = b.tokens = source.tokens;
    const std::vector<float> wanted = source.go_on();
    CHECK(a.go_on() == wanted);
    CHECK(b.go_on() == wanted);
    // The bytes are those of the formula.
    const TargetConfig & c = source.cache->model().config();
    const DraftConfig & d = source.context->model().config();
    const uint64_t kv_row = 2 * 2 * static_cast<uint64_t>(c.head_dim) * static_cast<uint64_t>(c.n_head_kv);
    const uint64_t attention = static_cast<uint64_t>(c.n_full_layers(0, c.n_layer));
    const uint64_t states =
        (static_cast<uint64_t>(c.n_layer) - attention) * 4 *
        static_cast<uint64_t>(c.ssm_dt_rank * c.ssm_d_state * c.ssm_d_state + (c.ssm_d_conv - 1) * c.conv_channels());
    const uint64_t draft_row = 2 * 2 * static_cast<uint64_t>(d.head_dim * d.n_head_kv * d.n_layer);
    const uint64_t logits = 4 * static_cast<uint64_t>(c.n_vocab);
    CHECK_EQ(full->bytes(), 135 * (attention * kv_row + draft_row + 4) + states + logits);
    CHECK_EQ(third->bytes(), 5 * (attention * kv_row + draft_row) + 135 * 4 + states + logits);
}

TEST(a_chain_of_many_links_is_freed_without_deep_recursion) {
    Sequence source(3, 0, 600);
    SnapshotPtr last = source.take();
    for (int i = 0; i < max_snapshot_depth; ++i) {
        source.add(1, i);
        last = source.take(last);
    }
    CHECK_EQ(last->depth(), max_snapshot_depth);
    source.add(1, 1);
    CHECK(status_of([&] { source.take(last); }) == Status::mismatch);
    Sequence other(0, 0, 600);
    restore_target_cache(*last, *other.cache, other.context.get());
    CHECK_EQ(other.cache->position(), 3 + max_snapshot_depth);
    free_prefix_snapshot(last);
    CHECK(last == nullptr);
}

TEST(a_thin_chain_is_refused_because_the_recurrent_state_would_stay_behind) {
    Sequence source(80);
    const SnapshotPtr thick = source.take();
    source.add(20, 1);
    const SnapshotPtr thin = snapshot_target_cache_thin(*source.cache, 80, 100);
    Sequence other(0);
    const std::vector<float> before = other.state();
    std::string message;
    CHECK(status_of([&] { restore_target_cache_chain(thick.get(), {thin.get()}, *other.cache); }, &message) ==
          Status::unsupported);
    CHECK(message.find("recurrent layers would stay behind") != std::string::npos);
    CHECK(status_of([&] { restore_target_cache(*thin, *other.cache, nullptr); }) == Status::unsupported);
    CHECK(other.state() == before);
    // Inside the base there is nothing that could stay behind.
    const SnapshotPtr inside = snapshot_target_cache_thin(*source.cache, 10, 30);
    restore_target_cache_chain(thick.get(), {inside.get()}, *other.cache);
    CHECK_EQ(other.cache->position(), 80);
}

TEST(a_thin_chain_works_where_no_layer_is_recurrent) {
    const auto options = [] {
        TargetCacheOptions o;
        o.capacity = 256;
        o.layer_begin = 3; // one full-attention layer
        o.layer_end = 4;
        return o;
    };
    const auto model = Sequence::target();
    REQUIRE(!model->config().recurrent[3]);
    const auto fill = [&](TargetCache & cache, int64_t n) {
        TargetForward forward(cache);
        std::vector<float> hidden(static_cast<size_t>(n * model->config().n_embd));
        for (size_t i = 0; i < hidden.size(); ++i) {
            hidden[i] = static_cast<float>((i * 7) % 13) * 0.1f;
        }
        ForwardRequest q;
        q.hidden = hidden.data();
        q.n = n;
        forward.forward(q);
    };
    auto source = TargetCache::create(model, options());
    fill(*source, 40);
    SnapshotOptions plain;
    const SnapshotPtr thick = snapshot_target_cache(*source, nullptr, plain);
    fill(*source, 20);
    const SnapshotPtr a = snapshot_target_cache_thin(*source, 40, 50);
    const SnapshotPtr b = snapshot_target_cache_thin(*source, 45, 60);
    auto other = TargetCache::create(model, options());
    CHECK(status_of([&] { restore_target_cache_chain(nullptr, {b.get()}, *other); }) == Status::invalid); // a gap
    restore_target_cache_chain(thick.get(), {b.get(), a.get()}, *other);
    CHECK_EQ(other->position(), 60);
    CHECK(read_cache_tensor(*other, 3, "k", 0, 60) == read_cache_tensor(*source, 3, "k", 0, 60));
    CHECK(read_cache_tensor(*other, 3, "v", 0, 60) == read_cache_tensor(*source, 3, "v", 0, 60));
}

TEST(what_does_not_fit_is_refused_before_anything_is_written) {
    Sequence source(60);
    const SnapshotPtr snapshot = source.take();
    const auto refused = [&](Sequence & into, bool with_context, const char * reason) {
        const std::vector<float> before = into.state();
        RestoreOptions options;
        options.before_write = [](int64_t) { fail(Status::internal, "it wrote"); };
        std::string message;
        const Status status = status_of(
            [&] { restore_target_cache(*snapshot, *into.cache, with_context ? into.context.get() : nullptr, options); },
            &message);
        CHECK(message.find(reason) != std::string::npos);
        CHECK(into.state() == before);
        return status;
    };
    Sequence small(5, 1, 32);
    CHECK(refused(small, true, "a snapshot of 60 tokens, the cache takes 32") == Status::capacity);
    Sequence typed(5, 1, 256, "q8_0");
    CHECK(refused(typed, true, "K type: the snapshot has f16, the cache has q8_0") == Status::mismatch);

    SnapshotOptions alone;
    alone.tokens = source.tokens;
    const SnapshotPtr without = snapshot_target_cache(*source.cache, nullptr, alone);
    Sequence into(5, 1);
    CHECK(status_of([&] { restore_target_cache(*without, *into.cache, into.context.get()); }) == Status::mismatch);
    restore_target_cache(*snapshot, *into.cache, nullptr); // a target alone may use what a pair has left
    CHECK_EQ(into.cache->position(), 60);
}

TEST(a_bigger_ring_than_the_one_it_was_taken_from_is_refused_once_rows_are_missing) {
    Sequence source(600, 0, 1024, "f16", 64); // the rings of both layers have wrapped
    const int64_t ring = source.context->ring_capacity(0);
    REQUIRE(ring < 600);
    const SnapshotPtr snapshot = source.take();
    CHECK_EQ(snapshot->header().draft_held[0], 600 - ring);
    Sequence bigger(0, 0, 1024, "f16", 512);
    std::string message;
    CHECK(status_of([&] { restore_target_cache(*snapshot, *bigger.cache, bigger.context.get()); }, &message) ==
          Status::mismatch);
    CHECK(message.find("draft rows of layer 0") != std::string::npos);
    // The opposite way the newest rows are what a cold run would have kept.
    Sequence wide(600, 0, 1024, "f16", 1024);
    Sequence narrow(0, 0, 1024, "f16", 64);
    restore_target_cache(*wide.take(), *narrow.cache, narrow.context.get());
    narrow.tokens = source.tokens;
    CHECK(narrow.go_on() == source.go_on());
}

TEST(taking_refuses_what_it_cannot_keep) {
    Sequence source(10);
    const SnapshotPtr snapshot = source.take();
    CHECK(status_of([&] { source.take(snapshot); }) == Status::mismatch); // nothing added
    Sequence empty(0);
    CHECK(status_of([&] { empty.take(); }) == Status::invalid);
    SnapshotOptions options;
    options.tokens = {1, 2, 3};
    CHECK(status_of([&] { snapshot_target_cache(*source.cache, nullptr, options); }) == Status::invalid);
    Sequence stranger(12, 9);
    CHECK(status_of([&] { stranger.take(snapshot); }) == Status::mismatch); // another prefix
    CHECK(status_of([&] { snapshot_target_cache_thin(*source.cache, 3, 11); }) == Status::invalid);
    CHECK(status_of([&] { snapshot_target_cache_thin(*source.cache, -1, 3); }) == Status::invalid);
    CHECK(status_of([&] { snapshot_target_cache_thin(*source.cache, 3, 3); }) == Status::invalid);
}

TEST(bytes_on_the_device_are_the_same_as_on_the_host) {
    Sequence source(50);
    SnapshotOptions options;
    options.tokens = source.tokens;
    options.on_device = true;
    const SnapshotPtr there = snapshot_target_cache(*source.cache, source.context.get(), options);
    const SnapshotPtr here = source.take();
    CHECK(there->on_device() && !here->on_device());
    REQUIRE(there->parts().size() == here->parts().size());
    for (size_t i = 0; i < here->parts().size(); ++i) {
        std::vector<uint8_t> a(here->parts()[i].n_bytes), b(a.size());
        here->read(here->parts()[i], a.data());
        there->read(there->parts()[i], b.data());
        CHECK(a == b);
    }
    Sequence other(0);
    restore_target_cache(*there, *other.cache, other.context.get());
    other.tokens = source.tokens;
    CHECK(other.go_on() == source.go_on());
}

TEST(an_imported_snapshot_is_checked_against_the_models) {
    Sequence source(20);
    const SnapshotPtr original = source.take();
    std::vector<std::vector<uint8_t>> bytes;
    std::vector<const void *> data;
    std::vector<uint64_t> sizes;
    for (const SnapshotPart & part : original->parts()) {
        bytes.emplace_back(part.n_bytes);
        original->read(part, bytes.back().data());
    }
    for (const auto & block : bytes) {
        data.push_back(block.data());
        sizes.push_back(block.size());
    }
    const auto import = [&](const SnapshotHeader & header) {
        return import_snapshot(header, Sequence::target(), Sequence::drafter(), nullptr, source.tokens,
                               original->logits(), data, sizes);
    };
    Sequence other(0);
    restore_target_cache(*import(original->header()), *other.cache, other.context.get());
    other.tokens = source.tokens;
    CHECK(other.go_on() == source.go_on());

    const auto broken = [&](const std::function<void(SnapshotHeader &)> & change) {
        SnapshotHeader header = original->header();
        change(header);
        return status_of([&] { import(header); });
    };
    CHECK(broken([](SnapshotHeader & h) { h.version = 2; }) == Status::mismatch);
    CHECK(broken([](SnapshotHeader & h) { h.target_digest[0] ^= 1; }) == Status::mismatch);
    CHECK(broken([](SnapshotHeader & h) { h.draft_digest[0] ^= 1; }) == Status::mismatch);
    CHECK(broken([](SnapshotHeader & h) { h.architecture = "qwen35moe"; }) == Status::mismatch);
    CHECK(broken([](SnapshotHeader & h) { h.rope_theta = 1e6f; }) == Status::mismatch);
    CHECK(broken([](SnapshotHeader & h) { h.k_rotation = 64; }) == Status::mismatch);
    CHECK(broken([](SnapshotHeader & h) { h.k_type = "q8_0"; }) != Status::ok);
    CHECK(broken([](SnapshotHeader & h) { h.k_type = "q9"; }) == Status::invalid);
    CHECK(broken([](SnapshotHeader & h) { h.layer_end = 13; }) == Status::mismatch);
    CHECK(broken([](SnapshotHeader & h) { h.position = 21; }) == Status::format);
    CHECK(broken([](SnapshotHeader & h) { h.position = int64_t{1} << 62; }) == Status::format);
    CHECK(broken([](SnapshotHeader & h) { h.position = -1; }) == Status::format);
    CHECK(broken([](SnapshotHeader & h) { h.kv_begin = 3; }) == Status::format);
    CHECK(broken([](SnapshotHeader & h) { h.kind = static_cast<SnapshotKind>(7); }) == Status::format);
    CHECK(broken([](SnapshotHeader & h) { h.kind = SnapshotKind::delta; }) == Status::format);
    CHECK(broken([](SnapshotHeader & h) { h.features.begin = 2; }) == Status::format);
    CHECK(broken([](SnapshotHeader & h) { h.draft_rows.pop_back(); }) == Status::format);
    CHECK(broken([](SnapshotHeader & h) { h.draft_rows[0] = 5; }) == Status::format);
    CHECK(broken([](SnapshotHeader & h) { h.draft_cursor = 30; }) == Status::format);
    CHECK(broken([](SnapshotHeader & h) { h.capture_layers = {3, 1}; }) == Status::invalid);
}

TEST(a_drafter_on_another_device_goes_on_too) {
    // Its rows lie there, and features travel through a mirror, which a restore has to empty.
    const auto elsewhere = Device::open("cpu", 1);
    const auto drafter = load_draft_gguf(DFLASH_TEST_MODELS "/demo-draft-bf16.gguf", elsewhere, Sequence::target());
    struct Pair {
        explicit Pair(const std::shared_ptr<const DraftModel> & drafter)
            : context(DraftContext::create(drafter, Sequence::draft_options(512))), draft(*context) {
            TargetCacheOptions options;
            options.capacity = 256;
            options.capture_layers = drafter->config().target_layer_ids;
            cache = TargetCache::create(Sequence::target(), options);
            target = std::make_unique<TargetForward>(*cache);
            DraftFeatureMirrorOptions ring;
            ring.n_target_layers = drafter->config().n_taps();
            ring.hidden_size = drafter->config().n_embd;
            ring.capacity = 256;
            draft_feature_mirror_init(mirror, drafter->device(), ring);
            decoder = std::make_unique<Decoder>(*cache, *target, context.get(), &draft, &mirror, DecoderOptions{});
        }
        std::vector<int32_t> run(const std::vector<int32_t> & ids) {
            decoder->begin(SamplingParams{}, {});
            std::vector<int32_t> all = decoder->prefill(ids.data(), static_cast<int64_t>(ids.size()), 64, {}).tokens;
            for (const int32_t width : {8, 1, 1, 8, 16}) {
                const StepResult step = decoder->step(width, 64);
                all.insert(all.end(), step.tokens.begin(), step.tokens.end());
                all.push_back(-step.n_accepted);
            }
            decoder->settle();
            return all;
        }
        std::unique_ptr<TargetCache> cache;
        std::unique_ptr<DraftContext> context;
        DraftForward draft;
        std::unique_ptr<TargetForward> target;
        DraftFeatureMirror mirror;
        std::unique_ptr<Decoder> decoder;
    };
    Pair source(drafter), other(drafter);
    std::vector<int32_t> ids, strange;
    for (int32_t i = 0; i < 60; ++i) {
        ids.push_back(i * 37 % 4000);
        strange.push_back(i * 91 % 4000);
    }
    source.decoder->begin(SamplingParams{}, {});
    source.decoder->feed(ids.data(), 60, {});
    SnapshotOptions options;
    options.tokens = ids;
    const SnapshotPtr snapshot = snapshot_target_cache(*source.cache, source.context.get(), options);
    snapshot->wait();
    const std::vector<int32_t> wanted = source.run({5, 6, 7});
    other.run(strange);
    other.decoder->restore(*snapshot);
    CHECK(other.run({5, 6, 7}) == wanted);
}

TEST(memory_of_freed_snapshots_is_used_again) {
    Sequence source(40);
    source.take().reset();
    HostMemoryPool & pool = source.cache->model().device()->host_memory();
    const uint64_t kept = pool.free_bytes();
    CHECK(kept > 0);
    {
        const SnapshotPtr again = source.take();
        CHECK(pool.free_bytes() < kept);
    }
    CHECK_EQ(pool.free_bytes(), kept);
}
