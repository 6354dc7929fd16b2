#include <algorithm>

#include "base/error.hpp"
#include "base/log.hpp"
#include "state/prefix_access.hpp"
#include "state/prefix_snapshot.hpp"

namespace dflash {
namespace {

long long say(int64_t value) {
    return static_cast<long long>(value);
}

void check_kv_fits(const PrefixSnapshot & s, const TargetCache & cache) {
    const SnapshotHeader & h = s.header();
    check_same_target(h, "the snapshot", header_of(cache, nullptr), "the cache");
    check(h.position <= cache.capacity(), Status::capacity, "a snapshot of %lld tokens, the cache takes %lld",
          say(h.position), say(cache.capacity()));
}

/// First position that this context keeps of a layer once the snapshot's rows are in it.
int64_t first_kept(const SnapshotHeader & h, const DraftContext & context, int32_t layer) {
    return std::min(std::max(h.draft_begin, h.draft_high - context.ring_capacity(layer)), h.draft_cursor);
}

void check_draft_fits(const SnapshotHeader & h, const DraftContext & context, const SnapshotHeader & of_context) {
    check(h.has_draft(), Status::mismatch, "the snapshot has no drafter state");
    check_same_drafter(h, "the snapshot", of_context, "the context");
    for (int32_t i = 0; i < context.model().config().n_layer; ++i) {
        const int64_t held = h.draft_held[static_cast<size_t>(i)];
        check(held <= first_kept(h, context, i), Status::mismatch,
              "draft rows of layer %d: the snapshot has them from %lld, this context keeps them from %lld", i,
              say(held), say(first_kept(h, context, i)));
    }
}

/// Feature rows that a restore puts back.
PositionRange features_to_restore(const SnapshotHeader & h, const TargetCache & cache, const DraftContext * context) {
    int64_t begin = std::max(h.features.begin, h.features.end - cache.feature_capacity());
    if (cache.target_feat() == nullptr) {
        begin = h.features.end;
    }
    if (context != nullptr) {
        check(begin <= h.draft_cursor, Status::capacity,
              "features from %lld on fit this ring, the drafter goes on from %lld", say(begin), say(h.draft_cursor));
    }
    return {begin, h.features.end};
}

/// Writes that can be taken back.
class Writer {
  public:
    Writer(TargetCache & cache, DraftContext * context, const RestoreOptions & options)
        : cache_(cache), context_(context), options_(options), cache_live_(cache.position() > 0),
          context_live_(context != nullptr && context->cursor() > context->begin()) {}

    /// Copies rows [begin, begin + n) of a part, or the whole of a state.
    void put(const PrefixSnapshot & snapshot, const SnapshotPart & part, int64_t begin, int64_t n) {
        ggml_tensor * tensor = tensor_of(part, cache_, context_);
        check(!spans_devices(tensor), Status::unsupported, "%s lies on several devices", part.name.c_str());
        Device & device = of_drafter(part) ? *context_->model().device() : *cache_.model().device();
        const auto guard = device.lock();
        for (const PartRun & run : runs_of(part, begin, n, cache_, context_)) {
            if (of_drafter(part) ? context_live_ : cache_live_) {
                Old old{&device, tensor, run.offset, std::vector<uint8_t>(run.n_bytes)};
                device.synchronize();
                tensor_read(tensor, old.bytes.data(), old.offset, old.bytes.size());
                old_.push_back(std::move(old));
            }
            if (options_.before_write) {
                options_.before_write(n_writes_);
            }
            ++n_writes_;
            SnapshotAccess::put(snapshot, device, part, run.at, tensor, run.offset, run.n_bytes);
        }
    }

    void wait() {
        cache_.model().device()->synchronize();
        if (context_ != nullptr && context_->model().device() != cache_.model().device()) {
            const auto guard = context_->model().device()->lock();
            context_->model().device()->synchronize();
        }
    }

    /// Everything as it was.
    void take_back() {
        wait();
        for (auto it = old_.rbegin(); it != old_.rend(); ++it) {
            const auto guard = it->device->lock();
            tensor_write(it->tensor, it->bytes.data(), it->offset, it->bytes.size());
        }
        if (!cache_live_) {
            cache_.zero_recurrent();
        }
    }

  private:
    struct Old {
        Device * device;
        ggml_tensor * tensor;
        uint64_t offset;
        std::vector<uint8_t> bytes;
    };

    TargetCache & cache_;
    DraftContext * context_;
    const RestoreOptions & options_;
    bool cache_live_, context_live_;
    int64_t n_writes_ = 0;
    std::vector<Old> old_;
};

/// The whole snapshot with its parents, oldest first.
std::vector<const PrefixSnapshot *> chain_of(const PrefixSnapshot & snapshot) {
    std::vector<const PrefixSnapshot *> chain;
    for (const PrefixSnapshot * s = &snapshot; s != nullptr; s = s->parent().get()) {
        chain.push_back(s);
    }
    std::reverse(chain.begin(), chain.end());
    return chain;
}

void write_chain(Writer & writer, const PrefixSnapshot & snapshot, const DraftContext * context,
                 PositionRange features) {
    const SnapshotHeader & h = snapshot.header();
    for (const PrefixSnapshot * s : chain_of(snapshot)) {
        s->wait();
        for (const SnapshotPart & part : s->parts()) {
            switch (part.source) {
            case SnapshotPart::Source::k:
            case SnapshotPart::Source::v:
                writer.put(*s, part, part.begin, part.rows);
                break;
            case SnapshotPart::Source::recurrent:
            case SnapshotPart::Source::conv:
                if (s == &snapshot) {
                    writer.put(*s, part, 0, 0);
                }
                break;
            case SnapshotPart::Source::features:
                if (s == &snapshot && features.size() > 0) {
                    writer.put(*s, part, features.begin, features.size());
                }
                break;
            case SnapshotPart::Source::draft_k:
            case SnapshotPart::Source::draft_v:
                if (context != nullptr && s->header().draft_digest == h.draft_digest) {
                    // Rows that the links below bring, or that this context does not keep, are not needed.
                    const int64_t begin = std::max(part.begin, first_kept(h, *context, part.layer));
                    const int64_t end = std::min(part.begin + part.rows, h.draft_cursor);
                    if (begin < end) {
                        writer.put(*s, part, begin, end - begin);
                    }
                }
                break;
            }
        }
    }
}

template <class Body> void all_or_nothing(Writer & writer, Body && body) {
    try {
        body();
        writer.wait();
    } catch (...) {
        try {
            writer.take_back();
        } catch (const std::exception & error) {
            log(LogLevel::error, "a failed restore could not be taken back: %s", error.what());
            fail(Status::poisoned, "a restore failed and could not be taken back: %s", error.what());
        }
        throw;
    }
}

} // namespace

void check_restore(const PrefixSnapshot & snapshot, const TargetCache & cache, const DraftContext * context) {
    check(snapshot.header().kind != SnapshotKind::thin, Status::unsupported,
          "a thin snapshot holds K/V and no recurrent state: it cannot be restored by itself");
    check_kv_fits(snapshot, cache);
    if (context != nullptr) {
        check_draft_fits(snapshot.header(), *context, header_of(cache, context));
    }
    features_to_restore(snapshot.header(), cache, context);
}

void restore_target_cache(const PrefixSnapshot & snapshot, TargetCache & cache, DraftContext * context,
                          const RestoreOptions & options) {
    check_restore(snapshot, cache, context);
    const SnapshotHeader & h = snapshot.header();
    const PositionRange features = features_to_restore(h, cache, context);
    std::vector<float> logits = snapshot.logits();
    const auto guard = cache.model().device()->lock();
    Writer writer(cache, context, options);
    all_or_nothing(writer, [&] { write_chain(writer, snapshot, context, features); });
    cache.note_restored(h.position, features.begin);
    cache.last_logits = std::move(logits);
    if (context != nullptr) {
        context->note_restored(h.draft_begin, h.draft_cursor, h.draft_high);
    }
}

void restore_target_cache_chain(const PrefixSnapshot * thick, const std::vector<const PrefixSnapshot *> & thins,
                                TargetCache & cache, const RestoreOptions & options) {
    int64_t end = cache.position();
    if (thick != nullptr) {
        check_restore(*thick, cache, nullptr);
        end = thick->position();
    }
    const int64_t base = end;
    for (const PrefixSnapshot * thin : thins) {
        const SnapshotHeader & h = thin->header();
        check(h.kind == SnapshotKind::thin, Status::invalid, "a chain is made of thin snapshots behind the first");
        check_kv_fits(*thin, cache);
        end = std::max(end, h.position);
    }
    const TargetConfig & c = cache.model().config();
    const bool recurrent =
        c.n_full_layers(cache.layer_begin(), cache.layer_end()) < cache.layer_end() - cache.layer_begin();
    check(end == base || !recurrent, Status::unsupported,
          "K/V up to %lld behind a state at %lld: the recurrent layers would stay behind, so nothing could be decoded "
          "from there; a delta snapshot has their state",
          say(end), say(base));
    std::vector<PositionRange> ranges;
    for (const PrefixSnapshot * thin : thins) {
        ranges.push_back({thin->header().kv_begin, thin->position()});
    }
    std::sort(ranges.begin(), ranges.end(), [](const auto & a, const auto & b) { return a.begin < b.begin; });
    int64_t covered = base;
    for (const PositionRange & range : ranges) {
        check(range.begin <= covered, Status::invalid, "no K/V of positions [%lld, %lld)", say(covered),
              say(range.begin));
        covered = std::max(covered, range.end);
    }
    const auto guard = cache.model().device()->lock();
    Writer writer(cache, nullptr, options);
    PositionRange features{end, end};
    all_or_nothing(writer, [&] {
        if (thick != nullptr) {
            features = features_to_restore(thick->header(), cache, nullptr);
            write_chain(writer, *thick, nullptr, features);
        }
        for (const PrefixSnapshot * thin : thins) {
            thin->wait();
            for (const SnapshotPart & part : thin->parts()) {
                writer.put(*thin, part, part.begin, part.rows);
            }
        }
    });
    std::vector<float> logits = thick != nullptr && end == base ? thick->logits() : std::vector<float>();
    const bool same = thick == nullptr && end == base;
    if (!same) {
        cache.note_restored(end, end == base ? features.begin : end);
        cache.last_logits = std::move(logits);
    }
}

} // namespace dflash
